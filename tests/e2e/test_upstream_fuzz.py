"""Upstreams that answer anything at all: the client gets an answer of its surface, and nobody else's bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from fuzz_rig import STREAMS, WHOLE, Scripted, quiet, two_upstreams
from hypothesis import event, given
from hypothesis import strategies as st
from line_rig import Line, line

from protocol.sse import EventSplitter, event_data

pytestmark = pytest.mark.e2e

QUIET = quiet(max_examples=150)
SERVER = "first_byte_timeout_seconds = 2\nidle_timeout_seconds = 2"
ASKED: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/completions": {"prompt": "hi"},
    "/responses": {"input": "hi"},
    "/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    "/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/embeddings": {"input": "hi"},
}
CASES = [
    ("/chat/completions", "native", True), ("/chat/completions", "native", False), ("/completions", "native", True),
    ("/responses", "native", True), ("/responses", "native", False), ("/responses", "chat", True),
    ("/responses", "chat", False), ("/messages", "native", True), ("/messages", "native", False),
    ("/messages", "chat", True), ("/messages", "chat", False), ("/messages/count_tokens", "native", False),
    ("/messages/count_tokens", "chat", False), ("/embeddings", "native", False),
]  # fmt: skip


def answer_of(body: bytes, kind: str, status: int = 200, *more: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n" % (status, kind.encode(), len(body))
    return head + b"".join(line + b"\r\n" for line in more) + b"\r\n" + body


def encode(found: Any) -> bytes:
    return json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")


def sse(events: Any) -> bytes:
    """Events of these; what is no list is no stream either."""
    return b"".join(event_of(found) for found in events) if isinstance(events, list) else encode(events)


def event_of(found: Any) -> bytes:
    kind = found.get("type") if isinstance(found, dict) else None
    name = b"event: " + kind.encode("utf-8", "replace") + b"\n" if isinstance(kind, str) else b""
    return name + b"data: " + (found.encode("utf-8", "replace") if isinstance(found, str) else encode(found)) + b"\n\n"


NAMES = [
    "id",
    "type",
    "choices",
    "delta",
    "message",
    "content",
    "usage",
    "error",
    "tool_calls",
    "finish_reason",
    "index",
    "text",
    "function",
    "arguments",
    "name",
    "output",
    "response",
    "status",
    "timings",
    "code",
    "model",
    "count",
]
STATUSES = (
    100, 101, 201, 204, 206, 301, 304, 400, 401, 403, 404, 408, 413, 418, 429, 500, 501, 502, 503, 504, 529, 599, 999,
)  # fmt: skip
RETRY_AFTER = ((), (b"retry-after: -1",), (b"retry-after: soon",), (b"retry-after: 9" + b"9" * 30,))
LINES = (
    b"content-length: 3", b"content-length: 0", b"transfer-encoding: chunked", b"content-encoding: gzip",
    b"content-encoding: br", b"connection: close", b"x: " + b"y" * 200_000, b"set-cookie: a=b", b"bad header",
    b"x-request-id: forged", b"server-timing: \xff;dur=nan, a;dur=1e999, b;dur=-1", b"content-type: a/b",
)  # fmt: skip
BEHIND = (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nOTHER", b"OTHER", b"\r\n\r\n")
names = st.sampled_from(NAMES)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | names
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)

Wire = tuple[bytes, bool]
"""What goes over the wire, and whether the connection ends then."""


@st.composite
def bent(draw: st.DrawFn, good: Any) -> Any:
    """A good answer with one place replaced by junk, or taken out."""
    if isinstance(good, dict) and good and draw(st.integers(0, 9)):
        name = draw(st.sampled_from(sorted(good)))
        if not draw(st.integers(0, 5)):
            return {key: value for key, value in good.items() if key != name}
        return {**good, name: draw(bent(good[name]))}
    if isinstance(good, list) and good and draw(st.integers(0, 9)):
        place = draw(st.integers(0, len(good) - 1))
        return [*good[:place], draw(bent(good[place])), *good[place + 1 :]]
    return draw(junk)


@st.composite
def with_status(draw: st.DrawFn, kind: str) -> Wire:
    """Some status, with a body that may be no error."""
    body = draw(st.sampled_from([b"", b"<html>no</html>", b"null"]) | junk.map(encode))
    kind = draw(st.sampled_from([kind, "text/html", ""]))
    return answer_of(body, kind, draw(st.sampled_from(STATUSES)), *draw(st.sampled_from(RETRY_AFTER))), True


def answers(good: bytes, body: Any, events: list[Any] | None) -> st.SearchStrategy[Wire]:
    """Answers that are wrong in what they say, in how they are framed, or in where they end."""
    if events is None:
        said = bent(body).map(lambda found: answer_of(encode(found), "application/json"))
    else:
        said = bent(events).map(lambda found: answer_of(sse(found), "text/event-stream"))
    in_head = st.sampled_from(LINES).map(lambda line: good.replace(b"\r\n\r\n", b"\r\n" + line + b"\r\n\r\n", 1))
    cut = st.integers(0, len(good)).map(lambda end: good[:end])
    raw = st.binary(max_size=200) | st.sampled_from([b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/2 200\r\n\r\n"])
    ended = in_head | cut | raw
    lasting = said | said | said | st.sampled_from(BEHIND).map(lambda rest: good + rest)
    kind = "application/json" if events is None else "text/event-stream"
    return lasting.map(lambda wire: (wire, False)) | ended.map(lambda wire: (wire, True)) | with_status(kind)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Line, Scripted]]:
    folder = tmp_path_factory.mktemp("fuzz")
    with Scripted().serving() as upstream:
        (folder / "tokenline.toml").write_text(two_upstreams(upstream.url, SERVER, upstream='health_path = ""'))
        with line(folder) as running:
            yield running, upstream
            assert running.metric("tokenline_requests_total", outcome="gateway_error") == 0
    log = (folder / "up.log").read_text()
    assert "Traceback" not in log, log[-3000:]
    assert "failed inside the gateway" not in log


@pytest.mark.parametrize(("path", "model", "stream"), CASES)
def test_any_answer_becomes_one_of_the_surface_and_the_next_client_gets_its_own(
    gateway: tuple[Line, Scripted], path: str, model: str, stream: bool
) -> None:
    running, upstream = gateway
    spoken = path if model == "native" else "/tokenize" if "count" in path else "/chat/completions"
    place = spoken if spoken == "/tokenize" else f"/v1{spoken}"
    body, events = WHOLE[place], STREAMS[place] if stream else None
    good = (
        answer_of(sse(events), "text/event-stream")
        if events
        else answer_of(json.dumps(body).encode(), "application/json")
    )
    session = requests.Session()
    session.trust_env = False
    session.headers["authorization"] = f"Bearer {running.key}"
    fields = {"model": model, **ASKED[path]} | ({"stream": True} if stream else {})

    def ask() -> requests.Response:
        return session.post(running.base_url + path, json=fields, timeout=20)

    def ask_well() -> list[Any]:
        upstream.answer, upstream.closes = good, False
        answer = ask()
        assert answer.status_code == 200, answer.text
        return [without_ids(found) for found in parts_of(answer)]

    usual = ask_well()

    @QUIET
    @given(made=answers(good, body, events))
    def check(made: tuple[bytes, bool]) -> None:
        upstream.answer, upstream.closes = made
        asked = upstream.asked
        answer = ask()
        assert upstream.asked > asked, "a breaker is open"
        event(str(answer.status_code))
        parts = parts_of(answer)
        if answer.status_code >= 400:
            check_error(parts[0], path, answer.status_code)
        assert ask_well() == usual

    check()


def parts_of(answer: requests.Response) -> list[Any]:
    """The JSON of a whole answer, or of every event; raises ValueError on anything else."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        splitter = EventSplitter()
        found = [event_data(one) for one in splitter.feed(answer.content)]
        assert splitter.flush() == b"", "the stream ends inside an event"
        return [data.decode("utf-8", "replace") for data in found if data is not None]
    return [answer.json()]


def check_error(found: Any, path: str, status: int) -> None:
    """An upstream's own client errors pass as they are on OpenAI's surfaces; the gateway's are whole."""
    assert isinstance(found, dict), found
    if status >= 500 or "messages" in path:
        assert isinstance(found["error"]["message"], str), found
        assert ("type" in found) == ("messages" in path)


def without_ids(found: Any) -> Any:
    """What differs from one answer to the next is left out."""
    fields = json.loads(found) if isinstance(found, str) and found.startswith("{") else found
    return json.dumps(strip(fields), sort_keys=True)


def strip(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: strip(inner) for name, inner in value.items() if name not in ("id", "item_id", "created_at")}
    return [strip(inner) for inner in value] if isinstance(value, list) else value
