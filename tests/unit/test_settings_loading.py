"""Files, spellings, environment and command line become one set of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings.errors import SettingsError
from settings.loader import load_settings

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        file = tmp_path / "tokenline.toml"
        file.write_text(text)
        return file

    return write


def test_the_throughput_articles_file_loads_as_it_stands():
    loaded = load_settings(EXAMPLES / "config-throughput.toml", {"TOKENLINE_API_KEY": "sk-mine"})
    settings = loaded.settings
    assert settings.server.api_key is not None
    assert settings.server.api_key.get_secret_value() == "sk-mine"
    assert settings.advertised_base_url == "http://127.0.0.1:8000/api"
    assert settings.engine.model == "your-model-name"
    assert (settings.engine.tensor_parallel_size, settings.engine.gpu_memory_utilization) == (4, 0.92)
    assert (settings.scheduler.max_num_seqs, settings.scheduler.max_num_batched_tokens) == (256, 8192)
    assert settings.token_interval.slot_reuse
    assert settings.logging.log_gpu_util
    assert loaded.notes == ()


def test_the_latency_articles_file_loads_as_it_stands_and_its_spellings_are_the_same_settings():
    loaded = load_settings(EXAMPLES / "config-latency.toml", {})
    settings = loaded.settings
    assert settings.engine.model == "your-model-id"
    assert settings.scheduler.max_num_seqs == 32
    assert (settings.server.max_concurrent_requests, settings.server.request_timeout_seconds) == (256, 120)
    assert (settings.model.kv_cache_ratio, settings.model.batch_wait_ms, settings.model.max_tokens) == (0.85, 10, 2048)
    assert settings.scheduler.queue_warn_ms == 200
    assert loaded.origins["engine.model"].endswith("config-latency.toml, as model.model_id")


def test_the_throughput_file_without_its_variable_names_the_variable():
    with pytest.raises(SettingsError, match=r"server\.api_key needs the environment variable TOKENLINE_API_KEY"):
        load_settings(EXAMPLES / "config-throughput.toml", {})


def test_command_line_wins_over_environment_over_file_over_default(toml):
    file = toml("[server]\nport = 1000\nops_port = 1001\notlp_port = 1002\n")
    environ = {"TOKENLINE_SERVER__PORT": "2000", "TOKENLINE_SERVER__OPS_PORT": "2001"}
    loaded = load_settings(file, environ, {"server.port": ("--port", 3000)})
    server = loaded.settings.server
    assert (server.port, server.ops_port, server.otlp_port, server.host) == (3000, 2001, 1002, "127.0.0.1")
    origins = [loaded.origins[f"server.{key}"] for key in ("port", "ops_port", "otlp_port", "host")]
    assert origins == ["--port", "TOKENLINE_SERVER__OPS_PORT", str(file), "default"]


def test_an_override_spares_the_file_its_missing_variable(toml):
    file = toml('[server]\napi_key = "${NOT_SET_ANYWHERE}"\n')
    loaded = load_settings(file, {"TOKENLINE_SERVER__API_KEY": "sk-1"})
    assert loaded.settings.server.api_key is not None
    assert loaded.settings.server.api_key.get_secret_value() == "sk-1"


def test_the_file_is_the_one_asked_for_else_the_variables_else_the_one_here_else_none(toml, tmp_path, monkeypatch):
    here = toml("[server]\nport = 1\n")
    named, asked = tmp_path / "named.toml", tmp_path / "asked.toml"
    named.write_text("[server]\nport = 2\n")
    asked.write_text("[server]\nport = 3\n")
    monkeypatch.chdir(here.parent)
    environ = {"TOKENLINE_CONFIG": str(named)}
    assert load_settings(asked, environ).settings.server.port == 3
    assert load_settings(None, environ).settings.server.port == 2
    assert load_settings(None, {}).settings.server.port == 1
    here.unlink()
    assert load_settings(None, {}).settings.server.port == 8080
    assert load_settings(None, {}).file is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("${A}", "x"),
        ("pre-${A}-${B}", "pre-x-y"),
        ("$${A}", "${A}"),
        ("$A costs $5", "$A costs $5"),
    ],
)
def test_references_are_expanded(toml, written, meant):
    file = toml(f'[engine]\nmodel = "{written}"\n')
    assert load_settings(file, {"A": "x", "B": "y"}).settings.engine.model == meant


def test_a_reference_can_stand_for_a_number(toml):
    assert load_settings(toml('[server]\nport = "${PORT}"\n'), {"PORT": "9000"}).settings.server.port == 9000


def test_references_are_expanded_in_lists_of_tables(toml):
    file = toml('[[upstreams]]\nname = "a"\nurl = "http://${HOST}/v1"\n')
    assert load_settings(file, {"HOST": "h:1"}).settings.upstreams[0].url == "http://h:1/v1"


def test_values_from_the_environment_are_not_expanded():
    loaded = load_settings(None, {"TOKENLINE_SERVER__API_KEY": "a${B}"})
    assert loaded.settings.server.api_key is not None
    assert loaded.settings.server.api_key.get_secret_value() == "a${B}"


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("TOKENLINE_SCHEDULER__MAX_NUM_SEQS", "64", ("scheduler", "max_num_seqs"), 64),
        ("TOKENLINE_MODEL__MAX_BATCH_SIZE", "64", ("scheduler", "max_num_seqs"), 64),
        ("TOKENLINE_MODEL__MODEL_ID", "123", ("engine", "model"), "123"),
        ("TOKENLINE_ENGINE__MODEL", "true", ("engine", "model"), "true"),
        ("TOKENLINE_LOGGING__LOG_TPS", "true", ("logging", "log_tps"), True),
        ("TOKENLINE_MODEL__KV_CACHE_RATIO", "1", ("model", "kv_cache_ratio"), 1.0),
        ("TOKENLINE_SERVER__PORT", "", ("server", "port"), 8080),
    ],
)
def test_environment_values_take_the_type_of_their_setting(name, text, key, value):
    section, field = key
    found = getattr(getattr(load_settings(None, {name: text}).settings, section), field)
    assert (found, type(found)) == (value, type(value))


def test_lists_and_named_tables_can_be_given_by_the_environment():
    environ = {
        "TOKENLINE_UPSTREAMS__0__NAME": "a",
        "TOKENLINE_UPSTREAMS__0__URL": "https://a.example/v1",
        "TOKENLINE_MODELS__0__NAME": "m",
        "TOKENLINE_MODELS__0__TARGETS__0__UPSTREAM": "a",
        "TOKENLINE_SLO__DEFAULT__TTFT_MS": "500",
    }
    settings = load_settings(None, environ).settings
    assert settings.upstreams[0].url == "https://a.example/v1"
    assert settings.models[0].targets[0].upstream == "a"
    assert settings.slo["default"].ttft_ms == 500


def test_variables_with_a_meaning_of_their_own_are_not_overrides(tmp_path):
    environ = dict.fromkeys(
        ("TOKENLINE_API_KEY", "TOKENLINE_ADMIN_KEY", "TOKENLINE_OPS_URL", "TOKENLINE_CACHE_DIR"), "x"
    )
    loaded = load_settings(None, environ | {"TOKENLINE_STATE_DIR": str(tmp_path)})
    assert loaded.settings.state_dir == tmp_path
    assert loaded.settings.server.api_key is None
    assert loaded.notes == ()


def test_an_override_with_one_underscore_too_few_is_pointed_out():
    (note,) = load_settings(None, {"TOKENLINE_SERVER_PORT": "1"}).notes
    assert "TOKENLINE_SERVER__PORT" in note


def test_a_secret_written_into_the_file_is_pointed_out_but_not_shown(toml):
    (note,) = load_settings(toml('[server]\napi_key = "sk-oops"\n'), {}).notes
    assert "server.api_key" in note
    assert "sk-oops" not in note


def test_the_default_objective_stays_when_a_model_gets_its_own(toml):
    settings = load_settings(toml("[slo.models]\nttft_ms = 100\n"), {}).settings
    assert settings.slo["models"].ttft_ms == 100
    assert settings.slo["default"].ttft_ms == 2000


def test_naming_upstreams_and_no_engine_means_that_no_engine_runs(toml):
    upstream = '[[upstreams]]\nname = "a"\nurl = "http://h/v1"\n'
    loaded = load_settings(toml(upstream), {})
    assert loaded.settings.engine.backend == "none"
    assert "[[upstreams]]" in loaded.origins["engine.backend"]
    assert load_settings(toml(upstream + '[engine]\nmodel = "m"\n'), {}).settings.engine.backend == "tokenline"


def test_the_same_value_under_both_spellings_is_fine(toml):
    file = toml('[engine]\nmodel = "m"\n[model]\nmodel_id = "m"\n')
    assert load_settings(file, {}).settings.engine.model == "m"
