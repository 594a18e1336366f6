"""The command line: what it offers, how it fails, what it prints."""

from __future__ import annotations

import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cli.announce import Facts, curl_line, lines_of
from cli.bootstrap import tenant_key, with_admin_key, write_key_file
from cli.durations import seconds_of
from cli.errors import CliError, Exit
from cli.exclusive import check_ports, owned_state_dir
from cli.extras import check_engine_installed
from cli.main import main
from cli.ops import OpsClient
from cli.reference import configuration_page
from gateway.keys.store import KeyStore
from settings.loader import load_settings
from settings.paths import prepare_state_dir


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """A state folder of this test alone, and a working directory without a tokenline.toml."""
    for name in list(os.environ):
        if name.startswith("TOKENLINE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TOKENLINE_STATE_DIR", str(tmp_path / "s"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "s"


@pytest.fixture
def tokenline(state, monkeypatch, capsys):
    """Runs the command: (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tokenline", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


VERBS = [
    ["up"],
    ["gateway"],
    ["engine"],
    ["keys", "create"],
    ["keys", "list"],
    ["keys", "show"],
    ["keys", "rotate"],
    ["keys", "revoke"],
    ["keys", "usage"],
    ["plans", "list"],
    ["why"],
    ["slow"],
    ["bench", "gap"],
    ["bench", "run"],
    ["bench", "sample"],
    ["bench", "compare"],
    ["bench", "report"],
    ["config", "show"],
    ["config", "schema"],
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_with_examples_json_and_exit_codes(tokenline, verb):
    code, out, _ = tokenline(*verb, "--help")
    assert code == 0
    assert "--json" in out
    assert "Example" in out
    assert "Exit codes: 0 success" in out


def test_only_verbs_that_are_built_are_offered(tokenline):
    _, out, _ = tokenline("--help")
    commands = out.split("Commands:")[1].split("Begin with")[0]
    assert [line.split()[0] for line in commands.strip().splitlines()] == [
        "up", "gateway", "engine", "why", "slow", "verify", "keys", "plans", "bench", "dashboards", "config",
    ]  # fmt: skip


def test_help_does_not_import_the_heavy_rooms():
    import subprocess
    import sys

    heavy = "('torch', 'transformers', 'fastapi', 'gateway.relay')"
    script = f"import sys, cli.main; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["config", "show"], ["up"], ["keys", "list"], ["why", "x"]])
def test_a_bad_configuration_is_one_line_and_exit_code_2(tokenline, monkeypatch, arguments):
    monkeypatch.setenv("TOKENLINE_SERVER__PROT", "1")
    code, out, err = tokenline(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("tokenline: ")
    assert "server.port" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        ({"TOKENLINE_ENGINE__BACKEND": "none"}, ["up"], "nothing to answer"),
        ({}, ["gateway"], "[[upstreams]]"),
        ({"TOKENLINE_ENGINE__BACKEND": "none"}, ["up", "--model", "m"], "--model"),
        ({}, ["up", "--device", "gpu"], "--device"),
        ({}, ["up", "--model", " "], "--model is empty"),
        ({"TOKENLINE_ENGINE__TENSOR_PARALLEL_SIZE": "4"}, ["up"], "tensor_parallel_size"),
        ({"TOKENLINE_SERVER__BASE_URL": "http://localhost:1/api"}, ["engine"], "server.base_url"),
        ({}, ["slow", "--window", "soon"], "--window"),
        ({}, ["keys", "create", "--alias", "a", "--expires", "5"], "--expires"),
        ({}, ["why", "x", "--ops-url", "localhost:1"], "--ops-url"),
        ({}, ["why", "x"], "admin key"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(tokenline, monkeypatch, environ, arguments, words):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, out, err = tokenline(*arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_a_key_is_created_listed_and_revoked(tokenline, state):
    code, out, _ = tokenline("keys", "create", "--alias", "app", "--models", "a, b", "--expires", "30d", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["secret"].startswith("sk-tl-")
    assert made["models"] == ["a", "b"]
    assert KeyStore(state / "keys.sqlite").list()[0].expires_ns == made["expires_ns"]
    _, out, _ = tokenline("keys", "list")
    assert "app" in out
    assert "works until" in out
    assert made["secret"] not in out
    _, out, _ = tokenline("keys", "revoke", "app")
    assert out == f"{made['id']} app: revoked\n"
    _, out, _ = tokenline("keys", "list", "--json")
    assert json.loads(out)["keys"][0]["revoked_ns"]


def test_the_secret_alone_is_on_standard_output(tokenline):
    _, out, err = tokenline("keys", "create", "--alias", "app")
    assert out.startswith("sk-tl-")
    assert out.count("\n") == 1
    assert "not shown again" in err


def test_a_key_with_a_plan_and_limits_is_made_shown_and_rotated(tokenline, state, tmp_path):
    (tmp_path / "tokenline.toml").write_text("[plans.free]\nrequests_per_minute = 60\n")
    limits = ("--rpm", "5", "--tpm", "6", "--concurrency", "7", "--daily", "8", "--monthly", "9")
    code, out, _ = tokenline(
        "keys", "create", "--alias", "app", "--plan", "free", *limits, "--tags", "web, blue", "--json"
    )
    made = json.loads(out)
    assert (code, made["plan"], made["tags"]) == (0, "free", ["web", "blue"])
    assert list(made["limits"].values()) == [5, 6, 7, 8, 9]
    _, out, _ = tokenline("keys", "rotate", "app", "--grace", "1h", "--json")
    rotated = json.loads(out)
    assert rotated["secret"] != made["secret"]
    assert rotated["previous_until_ns"] - rotated["rotated_ns"] == 3600 * 10**9
    _, out, _ = tokenline("keys", "show", "app")
    assert "5 requests/min" in out
    assert "old secret until" in out
    assert json.loads(tokenline("keys", "show", "app", "--json")[1])["id"] == made["id"]
    assert json.loads(tokenline("plans", "list", "--json")[1])["plans"][0]["limits"] == {"requests_per_minute": 60}
    assert "60 requests/min" in tokenline("plans", "list")[1]
    code, _, err = tokenline("keys", "create", "--alias", "b", "--plan", "gone")
    assert code == Exit.FAILURE
    assert "[plans.NAME]" in err
    assert tokenline("keys", "create", "--alias", "b", "--rpm", "0")[0] == Exit.USAGE


def test_usage_is_shown_by_key(tokenline, state):
    from tracing.clock import SystemClock
    from tracing.ledger import Ledger, Usage
    from tracing.observer.usage import UsageBook

    assert "no key was used" in tokenline("keys", "usage")[2]
    book = UsageBook(state / "usage.sqlite", SystemClock())
    used = Usage(input_tokens=10, output_tokens=4, source="usage")
    book.add(Ledger("r", "t", "s", SystemClock().wall_ns(), 1, key_alias="app", team="red", model="m", usage=used))
    book.flush()
    _, out, _ = tokenline("keys", "usage", "--window", "1h", "--json")
    (row,) = json.loads(out)["usage"]
    assert (row["key_alias"], row["team"], row["input_tokens"], row["output_tokens"]) == ("app", "red", 10, 4)
    assert "app" in tokenline("keys", "usage", "--by", "model")[1]


def test_keys_that_do_not_exist_or_exist_already_are_told_apart(tokenline):
    tokenline("keys", "create", "--alias", "a")
    assert tokenline("keys", "create", "--alias", "a")[0] == Exit.FAILURE
    code, _, err = tokenline("keys", "revoke", "nobody")
    assert (code, "nobody" in err) == (Exit.NOT_FOUND, True)


def test_config_show_says_where_values_came_from_and_hides_secrets(tokenline, monkeypatch):
    monkeypatch.setenv("TOKENLINE_SERVER__API_KEY", "sk-hush")
    _, out, _ = tokenline("config", "show", "--json")
    keys = json.loads(out)["keys"]
    assert keys["server.api_key"] == {"value": "(set, hidden)", "origin": "TOKENLINE_SERVER__API_KEY"}
    assert keys["server.port"] == {"value": 8080, "origin": "default"}
    _, text, _ = tokenline("config", "show")
    assert "sk-hush" not in out + text
    assert "server.api_key = (set, hidden)   (TOKENLINE_SERVER__API_KEY)" in text


def test_config_schema_prints_every_key(tokenline):
    _, out, _ = tokenline("config", "schema", "--json")
    keys = {entry["key"]: entry for entry in json.loads(out)}
    assert keys["scheduler.max_num_seqs"]["environment"] == "TOKENLINE_SCHEDULER__MAX_NUM_SEQS"
    _, text, _ = tokenline("config", "schema")
    assert [key for key in keys if f"{key} = " not in text] == []


def test_the_configuration_page_is_current():
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == configuration_page(), "run: make docs"


def test_the_first_start_makes_keys_and_later_starts_keep_them(state):
    settings = load_settings().settings
    prepare_state_dir(settings)
    key, admin = tenant_key(settings), with_admin_key(settings).server.admin_key
    assert tenant_key(settings) == key
    assert with_admin_key(settings).server.admin_key == admin
    assert [oct((state / name).stat().st_mode & 0o777) for name in ("key", "admin-key")] == ["0o600"] * 2
    assert (state / "key").read_text() == key + "\n"


def test_a_revoked_first_key_is_replaced_and_a_lost_file_ends_nobodys_key(state):
    settings = load_settings().settings
    prepare_state_dir(settings)
    store = KeyStore(settings.keys_path)
    first = tenant_key(settings)
    store.revoke("default")
    second = tenant_key(settings)
    assert second != first
    (state / "key").unlink()
    third = tenant_key(settings)
    assert third not in (first, second)
    working = {record.alias for record in store.list() if record.revoked_ns is None}
    assert working == {"default", "default-2"}


def test_without_redis_a_gateway_starts_with_the_key_that_it_kept(state, monkeypatch, free_port):
    monkeypatch.setenv("TOKENLINE_REDIS__URL", f"redis://127.0.0.1:{free_port}/0")
    settings = load_settings().settings
    prepare_state_dir(settings)
    with pytest.raises(CliError, match=r"redis\.url") as caught:
        tenant_key(settings)
    assert caught.value.code == Exit.UNREACHABLE
    write_key_file(state / "key", "sk-tl-kept")
    assert tenant_key(settings) == "sk-tl-kept"


def test_configured_keys_win_and_no_file_is_made(state, monkeypatch):
    monkeypatch.setenv("TOKENLINE_SERVER__API_KEY", "mine")
    monkeypatch.setenv("TOKENLINE_SERVER__ADMIN_KEY", "boss")
    settings = load_settings().settings
    prepare_state_dir(settings)
    assert tenant_key(settings) == "mine"
    assert with_admin_key(settings) is settings
    assert sorted(entry.name for entry in state.iterdir()) == ["run"]


def test_a_port_in_use_is_named_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CliError, match=rf"server\.ops_port = {port}.*in use.*TOKENLINE_SERVER__OPS_PORT"):
            check_ports([("server.ops_port", "127.0.0.1", port)])
    check_ports([("server.ops_port", "127.0.0.1", port)])


def test_an_address_of_another_machine_is_named():
    with pytest.raises(CliError, match=r"server\.port = 8080: 192\.0\.2\.1:8080 can't be listened on"):
        check_ports([("server.port", "192.0.2.1", 8080)])


def test_two_instances_on_one_state_folder_are_refused_until_the_first_has_ended(state):
    settings = load_settings().settings
    prepare_state_dir(settings)
    with owned_state_dir(settings, ["gateway"]):
        with pytest.raises(CliError, match=f"process {os.getpid()}.*TOKENLINE_STATE_DIR"):  # noqa: SIM117
            with owned_state_dir(settings, ["gateway", "engine"]):
                pass
        with owned_state_dir(settings, ["engine"]):
            pass
    with owned_state_dir(settings, ["gateway"]):
        pass


def test_without_torch_the_way_out_is_told_and_the_simulated_device_does_not_need_it(state, monkeypatch):
    def find(name: str) -> object:
        return None if name == "torch" else name

    with pytest.raises(CliError, match=r"not installed: torch\..*'\.\[engine\]'.*engine.backend = \"none\""):
        check_engine_installed(load_settings().settings, find)
    monkeypatch.setenv("TOKENLINE_ENGINE__DEVICE", "simulated")
    check_engine_installed(load_settings().settings, find)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1.5h", 5400), ("30d", 2_592_000), ("2W", 1_209_600)]
)
def test_lengths_of_time_are_read(text, seconds):
    assert seconds_of("--x", text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "0s", "1 hour", "1h30m"])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(CliError, match="--x"):
        seconds_of("--x", text)


def test_a_made_key_is_printed_and_a_configured_one_is_not(monkeypatch):
    made = Facts(base_url="http://h/api", key="sk-made", model="m", ops_url="http://o")
    assert "Bearer sk-made" in curl_line(made)
    assert any("sk-made" in line for line in lines_of(made))
    configured = Facts(base_url="http://h/api", key="sk-mine", model="it's", key_is_configured=True)
    monkeypatch.setenv("TOKENLINE_API_KEY", "sk-mine")
    assert "Bearer $TOKENLINE_API_KEY" in curl_line(configured)
    assert not any("sk-mine" in line for line in lines_of(configured))


@pytest.fixture
def ops_listener():
    """An HTTP server that answers with what the test puts in: (status, body)."""
    answer: list[object] = [200, {}]
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["authorization"])
            body = json.dumps(answer[1]).encode()
            self.send_response(int(str(answer[0])))
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answer, seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_why_prints_the_newest_match_flat_and_names_the_others(tokenline, monkeypatch, ops_listener):
    url, answer, seen = ops_listener
    answer[1] = {"matches": [{"request_id": "new", "ttft_ms": 1.0}, {"request_id": "old"}]}
    monkeypatch.setenv("TOKENLINE_ADMIN_KEY", "boss")
    code, out, _ = tokenline("why", "t", "--ops-url", url + "/admin/v1/", "--json")
    assert code == 0
    assert json.loads(out) == {"request_id": "new", "ttft_ms": 1.0, "other_matches": ["old"]}
    assert seen == ["Bearer boss"]


@pytest.mark.parametrize(
    ("status", "body", "code", "words"),
    [
        (401, {"error": {"message": "no"}}, Exit.FAILURE, "TOKENLINE_ADMIN_KEY"),
        (404, {"error": {"message": "not here"}}, Exit.NOT_FOUND, "not here"),
        (422, {"error": {"message": "window is bad"}}, Exit.FAILURE, "window is bad"),
        (500, {}, Exit.FAILURE, "status 500"),
        (200, [], Exit.FAILURE, "does not answer like"),
    ],
)
def test_answers_of_the_ops_listener_become_plain_errors(ops_listener, status, body, code, words):
    url, answer, _ = ops_listener
    answer[:] = [status, body]
    with pytest.raises(CliError, match=words) as caught:
        OpsClient(url, "k", key_from="x").request("GET", "/slow")
    assert caught.value.code is code


def test_a_listener_that_is_not_there_is_exit_code_4_whatever_proxy_is_set(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:9")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(CliError, match="tokenline up") as caught:
        OpsClient(f"http://127.0.0.1:{port}", "k", key_from="x").request("GET", "/slow")
    assert caught.value.code is Exit.UNREACHABLE


def test_the_admin_key_of_the_state_folder_is_used(tokenline, state, ops_listener):
    url, answer, seen = ops_listener
    answer[1] = {"requests": []}
    state.mkdir()
    write_key_file(state / "admin-key", "sk-admin")
    code, _, err = tokenline("slow", "--ops-url", url)
    assert (code, seen) == (0, ["Bearer sk-admin"])
    assert "no request ended" in err


def test_asking_does_not_need_the_tenant_key(tokenline, state, ops_listener, tmp_path, monkeypatch):
    url, answer, _ = ops_listener
    answer[1] = {"requests": []}
    (tmp_path / "tokenline.toml").write_text('[server]\napi_key = "${TOKENLINE_API_KEY}"\n')
    state.mkdir()
    write_key_file(state / "admin-key", "sk-admin")
    assert tokenline("slow", "--ops-url", url)[0] == 0
    assert tokenline("config", "show")[0] == Exit.USAGE
