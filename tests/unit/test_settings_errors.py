"""Every configuration that can't be used is refused with the key, its value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings.checks import check_engine_startable, check_startable
from settings.errors import SettingsError
from settings.loader import load_settings
from settings.paths import prepare_state_dir

UPSTREAM = '[[upstreams]]\nname = "a"\nurl = "http://h/v1"\n'


def refusal(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> str:
    file = tmp_path / "t.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(file, environ or {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1\n", ["unknown key server.prot", "server.port", "t.toml"]),
        ("[sever]\nport = 1\n", ["unknown section sever", "server"]),
        ("[engine]\nmax_num_seqs = 1\n", ["engine.max_num_seqs", "scheduler.max_num_seqs"]),
        ("[mysql]\nxyzzy = 1\n", ["unknown section mysql", "config schema"]),
        (UPSTREAM + 'modle = "x"\n', ["unknown key upstreams.0.modle"]),
        ('state_dir = "/x"\n', ["TOKENLINE_STATE_DIR"]),
        ("[server]\nport = 70000\n", ["server.port = 70000", "from 1 to 65535"]),
        ("[server]\nport = 80.5\n", ["server.port = 80.5", "whole number"]),
        ("[server]\nport = true\n", ["server.port = true", "whole number"]),
        ('[logging]\nlog_tps = "yes"\n', ['"yes"', "true or false"]),
        ("[engine]\nmodel = 5\n", ["engine.model = 5", "a string"]),
        ("[model]\nmax_batch_size = 0\n", ["model.max_batch_size = 0", "from 1 to 4096"]),
        ("[model]\nkv_cache_ratio = 0\n", ["kv_cache_ratio = 0", "above 0", "at most 1"]),
        ("[model]\nbatch_wait_ms = -1\n", ["batch_wait_ms = -1", "at least 0"]),
        ("[server]\nrequest_timeout_seconds = inf\n", ["finite"]),
        ("[server]\nport = 2020-01-01\n", ["dates"]),
        ("[server.port]\nx = 1\n", ["server.port", "not a table"]),
        ("server = 5\n", ["[server]", "table of keys"]),
        ("upstreams = 5\n", ["[[upstreams]]"]),
        ("[slo]\nttft_ms = 5\n", ["slo.ttft_ms", "[slo.default]"]),
        ("[slo.default]\ntarget = 1.0\n", ["slo.default.target", "below 1"]),
        ('[scheduler]\nscheduler_policy = "lifo"\n', ["scheduler_policy", '"fcfs"']),
        ('[scheduler]\npolicy = "static"\n', ["scheduler.policy", '"continuous_batching"']),
        ('[engine]\ndevice = "gpu"\n', ["engine.device", '"cuda"']),
        ("[server\n", ["not valid TOML", "line 1"]),
        ('[engine]\nmodel = "${NOPE}"\n', ["engine.model", "NOPE", "not set"]),
        ('[engine]\nmodel = "${1x}"\n', ["engine.model", "$${"]),
        (
            '[engine]\nmodel = "a"\n[model]\nmodel_id = "b"\n',
            ["engine.model = 'a'", "model.model_id = 'b'", "one setting"],
        ),
        (
            "[scheduler]\nmax_num_seqs = 4\n[model]\nmax_batch_size = 8\n",
            ["scheduler.max_num_seqs = 4", "model.max_batch_size = 8"],
        ),
        ('[server]\nbase_url = "127.0.0.1:8080/api"\n', ["server.base_url", "http"]),
        ('[server]\nbase_url = "http://h/api/v1"\n', ["server.base_url", "/api"]),
        ('[server]\nbase_url = "http://u:p@h/api"\n', ["user name or password"]),
        ('[server]\napi_key = ""\n', ["server.api_key is empty"]),
        ('[server]\napi_key = "a b"\n', ["server.api_key", "space"]),
        ('[server]\notlp_token = "a b"\n', ["server.otlp_token", "space"]),
        ("[server]\napi_key = 5\n", ["server.api_key = (hidden)"]),
        ("[tracing]\nrecord_content = true\n", ["tracing.record_content", "false"]),
        (UPSTREAM + UPSTREAM, ["'a'", "2 times"]),
        ('[[upstreams]]\nname = "a"\n', ["exactly one of url and unix_socket", "neither"]),
        (UPSTREAM + 'unix_socket = "/s"\n', ["exactly one", "both"]),
        ('[[upstreams]]\nname = "a"\nurl = "ftp://h"\n', ["ftp://h", "http://"]),
        ('[[upstreams]]\nname = "a"\nurl = "http://h:99999"\n', ["not a URL"]),
        ('[[upstreams]]\nname = "a"\nurl = "http://h/v1?k=1"\n', ["url", "? or #"]),
        ('[[upstreams]]\nname = "a"\nurl = "http://h/v1 x"\n', ["url", "space"]),
        (UPSTREAM + 'health_path = "models"\n', ["health_path = 'models'", "begin with /"]),
        ('[[upstreams]]\nname = "a b"\nurl = "http://h"\n', ["upstreams.0.name", "A-Z"]),
        ('[[upstreams]]\nurl = "http://h"\n', ["upstreams.0.name is missing"]),
        ("[[upstreams]]\n", ["upstreams.0", "empty"]),
        (UPSTREAM + '[[models]]\nname = "m"\n', ["models.0.targets is missing"]),
        (UPSTREAM + '[[models]]\nname = "m"\ntargets = [{upstream = "b"}]\n', ["'b'", "[[upstreams]]", "a"]),
        (UPSTREAM + '[[models]]\nname = "m"\ntargets = [{upstream = "a"}]\n' * 2, ["models", "'m'", "2 times"]),
    ],
)
def test_a_bad_file_is_refused_in_plain_words(tmp_path, text, words):
    message = refusal(tmp_path, text)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TOKENLINE_SERVER__PROT": "1"}, ["TOKENLINE_SERVER__PROT", "server.port"]),
        ({"TOKENLINE_SERVER__PORT": "x"}, ["TOKENLINE_SERVER__PORT", "whole number"]),
        ({"TOKENLINE_UPSTREAMS__1__NAME": "x"}, ["upstreams", "entry 0"]),
        ({"TOKENLINE_SERVER__PORT__X": "1"}, ["TOKENLINE_SERVER__PORT__X"]),
        ({"TOKENLINE_ENGINE__MODEL": "a", "TOKENLINE_MODEL__MODEL_ID": "b"}, ["one setting"]),
    ],
)
def test_a_bad_variable_is_refused_by_name(environ, words):
    with pytest.raises(SettingsError) as caught:
        load_settings(None, environ)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("rest", ["h:99999/v1", "[/v1", "h /v1"])
@pytest.mark.parametrize("scheme", ["http", "ftp"])
def test_a_password_in_a_bad_url_is_not_repeated(tmp_path, scheme, rest):
    for text in ('[[upstreams]]\nname = "a"\nurl = "{}"\n', '[server]\nbase_url = "{}"\n'):
        assert "pa/ss" not in refusal(tmp_path, text.format(f"{scheme}://user:pa/ss@{rest}"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"none\.toml: there is no such file"):
        load_settings(tmp_path / "none.toml", {})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"TOKENLINE_SERVER__BASE_URL": "http://127.0.0.1:9000/api"},
            ["server.base_url", "9000", "server.port = 8080"],
        ),
        ({"TOKENLINE_SERVER__BASE_URL": "http://localhost/api"}, ["port 80 ", "8080"]),
        ({"TOKENLINE_SERVER__OPS_PORT": "8080"}, ["server.port", "server.ops_port", "8080"]),
        (
            {
                "TOKENLINE_UPSTREAMS__0__NAME": "a",
                "TOKENLINE_UPSTREAMS__0__URL": "http://h",
                "TOKENLINE_UPSTREAMS__0__API_KEY_ENV": "A_KEY",
            },
            ["upstream a", "A_KEY"],
        ),
        (
            {
                "TOKENLINE_UPSTREAMS__0__NAME": "a",
                "TOKENLINE_UPSTREAMS__0__URL": "http://h",
                "TOKENLINE_UPSTREAMS__0__API_KEY_ENV": "A_KEY",
                "A_KEY": "sk-1\r\n",
            },
            ["upstream a", "A_KEY", "line break"],
        ),
    ],
)
def test_what_loads_but_cannot_start_says_why(environ, words):
    settings = load_settings(None, environ).settings
    with pytest.raises(SettingsError) as caught:
        check_startable(settings, environ)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080/api", "https://llm.example.com/api", "http://10.0.0.7:1/x/api/"]
)
def test_an_advertised_address_elsewhere_or_on_the_same_port_can_start(url):
    check_startable(load_settings(None, {"TOKENLINE_SERVER__BASE_URL": url}).settings, {})


def test_our_engine_refuses_to_be_spread_over_devices():
    settings = load_settings(None, {"TOKENLINE_ENGINE__TENSOR_PARALLEL_SIZE": "4"}).settings
    with pytest.raises(SettingsError, match=r'tensor_parallel_size = 4.*backend = "vllm"'):
        check_engine_startable(settings)


def test_a_state_folder_too_deep_for_a_socket_names_the_variable(tmp_path):
    settings = load_settings(None, {"TOKENLINE_STATE_DIR": str(tmp_path / ("x" * 90))}).settings
    with pytest.raises(SettingsError, match="TOKENLINE_STATE_DIR to a shorter path"):
        prepare_state_dir(settings)
    assert not settings.state_dir.exists()


def test_the_state_folder_is_made_for_this_user_alone(tmp_path):
    settings = load_settings(None, {"TOKENLINE_STATE_DIR": str(tmp_path / "s")}).settings
    prepare_state_dir(settings)
    prepare_state_dir(settings)
    assert [oct(folder.stat().st_mode & 0o777) for folder in (settings.state_dir, settings.run_dir)] == ["0o700"] * 2


@pytest.mark.parametrize(
    ("server", "startable"),
    [
        ('otlp_host = "0.0.0.0"', False),
        ('otlp_host = "::"', False),
        ('otlp_host = "10.0.0.5"', False),
        ('otlp_host = "0.0.0.0"\notlp_token = "secret"', True),
        ('otlp_host = "127.0.0.9"', True),
        ('otlp_host = "::1"', True),
        ('otlp_host = "localhost"', True),
    ],
)
def test_a_receiver_for_other_hosts_needs_a_token(tmp_path: Path, server: str, startable: bool) -> None:
    file = tmp_path / "t.toml"
    file.write_text(f"[server]\n{server}\n")
    settings = load_settings(file, {}).settings
    if startable:
        check_startable(settings, {})
        return
    with pytest.raises(SettingsError, match=r"server\.otlp_host = .*: whoever reaches port 4318.*server\.otlp_token"):
        check_startable(settings, {})
