"""Schemathesis over the published OpenAPI document: whatever is sent, the answer is one that the document promises.

Model `native` has an upstream that speaks every surface; model `chat` has one that speaks chat and tokenize alone, so
that responses, messages and count_tokens are translated. Both answer well: a 5xx is the gateway's own.
"""

from __future__ import annotations

import http.client
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from fuzz_rig import Everything, quiet, two_upstreams
from hypothesis import given
from hypothesis import strategies as st
from line_rig import Line, line
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.e2e

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
QUIET = quiet(max_examples=60)
PATHS = (
    "/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens", "/embeddings",
    "/tokenize", "/detokenize",
)  # fmt: skip


class Fuzzed:
    """The gateway, its document, and a connection with a valid key."""

    def __init__(self, gateway: Line, upstream: Everything) -> None:
        self.line = gateway
        self.upstream = upstream
        self.session = requests.Session()
        self.session.trust_env = False
        document = httpx.get(f"{gateway.base_url}/openapi.json").json()
        self.schema = schemathesis.openapi.from_dict(document)
        self.schema.config.generation.with_security_parameters = False

    def fields_of(self, path: str) -> set[str]:
        """The fields of a request that the document names."""
        content = self.schema.raw_schema["paths"][path]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        return set(self.schema.raw_schema["components"]["schemas"][name]["properties"])

    def send(self, case: Case) -> Any:
        headers = {"authorization": f"Bearer {self.line.key}"}
        return case.call(base_url=self.line.base_url, session=self.session, headers=headers, timeout=20)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder = tmp_path_factory.mktemp("fuzz")
    with Everything().serving() as upstream:
        (folder / "tokenline.toml").write_text(two_upstreams(upstream.url, server="max_body_bytes = 1000000"))
        with line(folder) as gateway:
            yield Fuzzed(gateway, upstream)
            assert gateway.metric("tokenline_requests_total", status_class="5xx") == 0
    assert upstream.strange == []
    log = (folder / "up.log").read_text()
    assert "Traceback" not in log
    assert "failed inside the gateway" not in log


@pytest.mark.parametrize("model", ["native", "chat"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_as_documented(fuzzed: Fuzzed, path: str, model: str, mode: GenerationMode) -> None:
    operation = fuzzed.schema[path]["POST"]
    is_positive = mode is GenerationMode.POSITIVE
    checks = [*CHECKS, positive_data_acceptance] if is_positive and model == "native" else CHECKS
    known = fuzzed.fields_of(path)

    @QUIET
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = model
            if is_positive and model == "chat":
                # A field that is not described passes through, and is refused where a request is translated.
                case.body = {name: value for name, value in case.body.items() if name in known}
        case.validate_response(fuzzed.send(case), checks=checks)

    check()


@pytest.mark.parametrize("path", ["/models", "/models/{model}"])
def test_models_answer_as_documented(fuzzed: Fuzzed, path: str) -> None:
    @QUIET
    @given(case=fuzzed.schema[path]["GET"].as_strategy())
    def check(case: Case) -> None:
        case.validate_response(fuzzed.send(case), checks=CHECKS)

    check()


HEADERS = (
    b"content-type", b"content-encoding", b"accept", b"accept-encoding", b"anthropic-version", b"anthropic-beta",
    b"expect", b"traceparent", b"tracestate", b"x-request-id", b"x-request-start", b"x-tokenline-timings",
    b"x-forwarded-for", b"transfer-encoding", b"content-length", b"connection", b"upgrade", b"cookie", b"range",
    b"authorization", b"x-api-key", b"api-key", b"idempotency-key",
)  # fmt: skip
USUAL = (
    b"", b"application/json", b"gzip", b"identity", b"100-continue", b"chunked", b"0", b"-1", b"1e9", b"close",
    b"websocket", b"Bearer x", b"Bearer ", b"t=" + b"9" * 40, b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01",
    b"\xff\xfe", b"x" * 9000, b"include",
)  # fmt: skip
LENGTHS = {b"content-length", b"transfer-encoding"}
values = st.sampled_from(USUAL) | st.binary(max_size=40).map(lambda found: found.translate(None, b"\r\n\0"))


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
def test_no_header_brings_a_worker_down(fuzzed: Fuzzed, path: str) -> None:
    port = int(fuzzed.line.origin.rpartition(":")[2])
    body = b'{"model": "native", "max_tokens": 5, "input": "hi", "messages": [{"role": "user", "content": "hi"}]}'

    answered: Counter[int] = Counter()

    @QUIET
    @given(st.lists(st.tuples(st.sampled_from(HEADERS), values), max_size=4))
    def check(headers: list[tuple[bytes, bytes]]) -> None:
        names = {name for name, _ in headers}
        head = [(b"host", b"h"), *headers]
        head += [] if b"authorization" in names else [(b"authorization", b"Bearer " + fuzzed.line.key.encode())]
        head += [] if names & LENGTHS else [(b"content-length", b"%d" % len(body))]
        with socket.create_connection(("127.0.0.1", port), timeout=0.3 if names & LENGTHS else 10) as client:
            lines = [b"POST /api%b HTTP/1.1" % path.encode(), *(name + b": " + value for name, value in head)]
            client.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            answer = http.client.HTTPResponse(client)
            try:
                answer.begin()
            except TimeoutError:
                assert names & LENGTHS, "more of the body is waited for than was announced"
                return
            said = answer.read()
        assert answer.status < 500, (answer.status, said)
        assert said.startswith(b"{") or answer.status == 400, (answer.status, said)
        answered[answer.status] += 1

    check()
    assert set(answered) >= {200, 400, 401}
    assert fuzzed.line.chat(model="chat").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_bytes_that_are_no_request_get_an_error_in_the_surface_s_shape(fuzzed: Fuzzed, path: str) -> None:
    url = fuzzed.line.base_url + path
    shape = {"type", "error", "request_id"} if "messages" in path else {"error"}

    @QUIET
    @given(body=st.binary(max_size=200) | st.sampled_from([b"[" * 100_000, b'{"model":' * 5000, b"\xff\xfe{}"]))
    def check(body: bytes) -> None:
        answer = fuzzed.session.post(url, data=body, headers={"authorization": f"Bearer {fuzzed.line.key}"}, timeout=20)
        assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
        assert set(answer.json()) == shape
        assert answer.json()["error"]["message"]

    check()
