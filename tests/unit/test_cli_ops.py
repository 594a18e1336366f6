"""Verbs that ask a running gateway: which listener, which key, and what its answers become."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cli.bootstrap import write_key_file
from cli.errors import CliError, Exit
from cli.ops import OpsClient


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
