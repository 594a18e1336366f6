"""Our settings as `vllm serve` is told them, and everything that it has no flag for."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backend_engine.backends.vllm_command import UDS_SINCE, VllmCommand, check_listener, find_vllm, version_of
from backend_engine.backends.vllm_flags import UNHEARD, check_vllm, inherited_by_vllm, notes_on, plan_of
from backend_engine.backends.vllm_process import shell_line
from protocol.timings import HostIdentity
from settings.catalogue import catalogue
from settings.errors import SettingsError
from settings.loader import load_settings
from settings.schema import DEMO_HUB_ID, EngineSettings, Settings

HOST = HostIdentity("the-host", "the-boot", "")
SOCKET = Path("/run/t/engine.sock")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def settings_of(**sections: Any) -> Settings:
    engine = {"backend": "vllm", "model": "org/model"} | sections.pop("engine", {})
    return Settings.model_validate({"state_dir": "/state", "engine": engine, **sections})


def told(settings: Settings, socket: Path | None = SOCKET, *, is_alone: bool = False, **inherited: str) -> str:
    return shlex.join(plan_of(settings, socket, host=HOST, inherited=inherited, is_alone=is_alone).arguments)


def environment(settings: Settings, *, is_alone: bool = False, **inherited: str) -> dict[str, str]:
    return plan_of(settings, SOCKET, host=HOST, inherited=inherited, is_alone=is_alone).environment


FLAGS: list[tuple[dict[str, Any], str]] = [
    ({}, "org/model --served-model-name org/model --dtype auto"),
    ({"engine": {"model": "smollm2"}}, f"{DEMO_HUB_ID} --served-model-name smollm2"),
    ({"engine": {"served_name": "public"}}, "--served-model-name public"),
    ({"engine": {"dtype": "bfloat16"}}, "--dtype bfloat16"),
    ({"engine": {"tensor_parallel_size": 4}}, "--tensor-parallel-size 4"),
    ({"engine": {"pipeline_parallel_size": 2}}, "--pipeline-parallel-size 2"),
    ({"engine": {"gpu_memory_utilization": 0.92}}, "--gpu-memory-utilization 0.92"),
    ({"engine": {"max_model_len": 8192}}, "--max-model-len 8192"),
    ({"engine": {"page_size": 32}}, "--block-size 32"),
    ({"model": {"max_tokens": 2048}}, """--override-generation-config '{"max_new_tokens": 2048}'"""),
    ({"scheduler": {"max_num_seqs": 64}}, "--max-num-seqs 64"),
    ({"scheduler": {"max_num_batched_tokens": 4096}}, "--max-num-batched-tokens 4096"),
    ({}, "--enable-chunked-prefill --scheduling-policy fcfs --async-scheduling"),
    ({"scheduler": {"enable_chunked_prefill": False}}, "--no-enable-chunked-prefill"),
    ({"token_interval": {"async_scheduling": False}}, "--no-async-scheduling"),
    ({}, "--uds /run/t/engine.sock"),
    ({"server": {"otlp_port": 4400}}, "--otlp-traces-endpoint http://127.0.0.1:4400/v1/traces"),
    ({"logging": {"level": "warning"}}, "--uvicorn-log-level warning"),
    ({"engine": {"vllm_args": ["--tool-call-parser", "hermes"]}}, "--tool-call-parser hermes"),
]


@pytest.mark.parametrize(("sections", "expected"), FLAGS)
def test_a_setting_becomes_its_flag(sections: dict[str, Any], expected: str) -> None:
    assert f" {expected} " in f" {told(settings_of(**sections))} "


def test_every_flag_is_one_that_vllm_documents(tmp_path: Path) -> None:
    everything = settings_of(
        engine={"max_model_len": 64, "page_size": 32, "vllm_args": ["--tokenizer", "t"]}, model={"max_tokens": 5}
    )
    program = "import fake_vllm, sys; sys.argv[1:] = sys.argv[2:]; print(fake_vllm.arguments().max_num_seqs)"
    command = [sys.executable, "-c", program, "", "serve", *shlex.split(told(everything))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert (done.stdout, done.stderr) == ("32\n", "")


def test_what_is_left_unsaid_is_left_to_vllm() -> None:
    line = told(settings_of())
    assert not any(
        flag in line for flag in ("--max-model-len", "--block-size", "--override-generation-config", "--port")
    )


def test_where_it_listens() -> None:
    by_port = settings_of(engine={"vllm_port": 8101})
    assert "--host 127.0.0.1 --port 8101" in told(by_port, None)
    assert "--host 0.0.0.0 --port 8000" in told(
        settings_of(server={"host": "0.0.0.0", "port": 8000}), None, is_alone=True
    )


def test_spans_go_to_the_receiver_by_http_directly_soon_and_say_whose_clock_they_have() -> None:
    found = environment(settings_of(), HTTP_PROXY="http://proxy", NO_PROXY="corp", OTEL_RESOURCE_ATTRIBUTES="a=b")
    assert found["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert found["NO_PROXY"] == found["no_proxy"] == "corp,127.0.0.1,localhost,::1"
    assert found["OTEL_BSP_SCHEDULE_DELAY"] == "500"
    assert found["OTEL_RESOURCE_ATTRIBUTES"] == "a=b,host.id=the-host,host.boot_id=the-boot"
    assert "OTEL_SERVICE_NAME" not in environment(settings_of(), OTEL_SERVICE_NAME="mine"), "the user's own stands"


def test_secrets_are_in_the_environment_alone_and_never_shown() -> None:
    settings = settings_of(server={"api_key": "sk-1", "otlp_token": "to ken"})
    plan = plan_of(settings, None, host=HOST, inherited={}, is_alone=True)
    assert plan.environment["VLLM_API_KEY"] == "sk-1"
    assert plan.environment["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] == "authorization=Bearer%20to%20ken"
    shown = shell_line(("vllm", "serve", *plan.arguments), plan)
    assert "sk-1" not in shown
    assert "ken" not in shown.replace("tokens", "").replace("max-num-batched", "").replace("tokenizer", "")
    assert "VLLM_API_KEY" not in environment(settings), "the gateway in front has its own keys"


def test_vllm_inherits_none_of_our_settings_and_nobody_elses_credentials() -> None:
    inherited = {"PATH": "/bin", "TOKENLINE_ADMIN_KEY": "x", "OTEL_EXPORTER_OTLP_HEADERS": "k=v", "VLLM_API_KEY": "y"}
    assert inherited_by_vllm(inherited) == {"PATH": "/bin"}


@pytest.mark.parametrize(("gib", "said"), [(2.0, "2"), (0.2, "1"), (7.6, "8")])
def test_on_a_cpu_the_cache_is_sized_by_vllms_own_variable(gib: float, said: str) -> None:
    settings = settings_of(engine={"device": "cpu", "cpu_kv_cache_gib": gib})
    assert environment(settings)["VLLM_CPU_KVCACHE_SPACE"] == said
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(settings_of())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine": {"device": "simulated"}}, "simulated"),
    ({"engine": {"dtype": "float64"}}, "float64"),
    ({"scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 32}}, "max_num_batched_tokens = 32 is below"),
    (
        {"engine": {"max_model_len": 4096}, "scheduler": {"enable_chunked_prefill": False}},
        "least engine.max_model_len = 4096",
    ),
    ({"engine": {"vllm_args": ["--served_model_name=x"]}}, "--served-model-name is Tokenline's to set"),
    ({"engine": {"vllm_args": ["--disable-log-stats"]}}, "--disable-log-stats"),
]


@pytest.mark.parametrize(("sections", "words"), REFUSED)
def test_what_vllm_could_only_fail_on_is_refused_before_it_starts(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_vllm(settings_of(**sections))
    assert words in str(caught.value)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("config-*.toml")), ids=lambda file: file.stem)
def test_every_key_of_the_articles_files_is_a_flag_or_a_note(file: Path) -> None:
    flags = {"engine.backend": ("--backend", "vllm")}
    loaded = load_settings(file, {"TOKENLINE_API_KEY": "sk-x"}, flags=flags)
    notes = notes_on(loaded.settings, loaded.origins)
    given = {key for key, origin in loaded.origins.items() if str(file) in origin and not key.startswith("server.")}
    heard = {
        "engine.model", "engine.tensor_parallel_size", "engine.pipeline_parallel_size", "engine.dtype",
        "engine.gpu_memory_utilization", "engine.max_model_len", "model.max_tokens", "scheduler.max_num_seqs",
        "scheduler.max_num_batched_tokens", "scheduler.enable_chunked_prefill", "scheduler.scheduler_policy",
        "token_interval.async_scheduling", "logging.level",
    }  # fmt: skip
    assert {note.split()[0] for note in notes} == given - heard


def test_a_note_names_only_keys_that_exist() -> None:
    assert set(UNHEARD) <= {key.dotted for key in catalogue()}


def test_nothing_is_noted_that_nobody_gave(tmp_path: Path) -> None:
    loaded = load_settings(None, {"TOKENLINE_STATE_DIR": str(tmp_path), "TOKENLINE_ENGINE__BACKEND": "vllm"})
    assert notes_on(loaded.settings, loaded.origins) == []


def test_the_command_is_the_one_named_else_the_paths_else_the_package() -> None:
    def nowhere(_name: str) -> None:
        return None

    named = EngineSettings(vllm_executable="/opt/vllm")
    assert find_vllm(named, which=lambda name: name, has_package=nowhere).words == ("/opt/vllm",)
    assert find_vllm(EngineSettings(), which=lambda _: "/usr/bin/vllm", has_package=nowhere).words == ("/usr/bin/vllm",)
    package = find_vllm(EngineSettings(), which=nowhere, has_package=lambda _: object())
    assert package.words == (sys.executable, "-m", "vllm.entrypoints.cli.main")
    with pytest.raises(SettingsError, match="pip install vllm"):
        find_vllm(EngineSettings(), which=nowhere, has_package=nowhere)
    with pytest.raises(SettingsError, match="/opt/vllm"):
        find_vllm(named, which=nowhere, has_package=lambda _: object())


@pytest.mark.parametrize(
    ("version", "port", "ok"),
    [
        ((0, 11, 2), None, False),
        (UDS_SINCE, None, True),
        (None, None, True),
        ((0, 8), 8101, True),
        ((1, 0), None, True),
    ],
)
def test_a_version_without_unix_sockets_needs_a_port(
    version: tuple[int, ...] | None, port: int | None, ok: bool
) -> None:
    engine = EngineSettings(backend="vllm", vllm_port=port)
    if ok:
        check_listener(engine, VllmCommand(("vllm",), version))
    else:
        with pytest.raises(SettingsError, match=r"vLLM 0\.11\.2 .* engine\.vllm_port"):
            check_listener(engine, VllmCommand(("vllm",), version))


def test_the_version_is_asked_of_the_python_that_the_command_runs_under(tmp_path: Path) -> None:
    """A package of that name, as an installer leaves it."""
    site = tmp_path / "site"
    (site / "vllm-0.13.0+cpu.dist-info").mkdir(parents=True)
    (site / "vllm-0.13.0+cpu.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.13.0+cpu\n")
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    script = tmp_path / "vllm"
    script.write_text(f"#!{python}\n")
    for file in (python, script):
        file.chmod(0o755)
    assert find_vllm(EngineSettings(vllm_executable=str(script))).version == (0, 13, 0)
    assert version_of(sys.executable) is None


def test_a_dry_run_prints_a_line_that_a_shell_reads_back(tokenline, monkeypatch) -> None:
    monkeypatch.setenv("TOKENLINE_API_KEY", "sk-very-secret")
    file = str(EXAMPLES / "config-throughput.toml")
    code, out, err = tokenline("engine", "--backend", "vllm", "--config", file, "--dry-run")
    words = shlex.split(out)
    assert code == 0
    assert words[0] == "env"
    assert words[words.index("serve") + 1] == "your-model-name"
    assert words[words.index("--tensor-parallel-size") + 1] == "4"
    assert "sk-very-secret" not in out + err
    assert "note: token_interval.slot_reuse" in err
    code, out, _ = tokenline("engine", "--backend", "vllm", "--config", file, "--dry-run", "--json")
    found = json.loads(out)
    assert shlex.split(found["shell"]) == found["command"]
    assert found["environment"]["VLLM_API_KEY"] == "(hidden)"
    assert any("slot_reuse" in note for note in found["notes"])


def test_a_dry_run_of_our_own_engine_has_nothing_to_print(tokenline) -> None:
    code, out, err = tokenline("engine", "--dry-run")
    assert (code, out) == (2, "")
    assert "--backend vllm" in err
