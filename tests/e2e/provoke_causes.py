"""Provokes, one after another, what makes requests slow, and asks `tokenline why` for its verdict on each.

    python tests/e2e/provoke_causes.py [--json]

A whole Tokenline on the simulated device: its times are known, so that each cause can be had alone. Some 30 requests
come first, so that there is something to compare with.
"""

from __future__ import annotations

import argparse
import json
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
from line_rig import Line, line

SLOTS = 8
USUAL_PROMPT = "tell me about the sea " * 3
LONG_PROMPT = USUAL_PROMPT * 3
USUAL_TOKENS = 8
USUAL_REQUESTS = 34
FALLBACK_MODEL = "with-fallback"
BUSY_SECONDS = 0.6

SETTINGS = """
[engine]
device = "simulated"
[scheduler]
max_num_seqs = {slots}
[simulated]
forward_ms = 10.0
prefill_token_us = 1000.0
decode_token_us = 1500.0
[server]
connect_timeout_seconds = 0.6
[[upstreams]]
name = "dead"
url = "http://127.0.0.1:{dead_port}/v1"
health_path = ""
[[models]]
name = "{model}"
targets = [{{ upstream = "dead" }}, {{ upstream = "engine" }}]
"""


class Provoker:
    """Causes on demand. Every method gives the id of the request that suffered."""

    def __init__(self, up: Line) -> None:
        self._up = up
        self._pool = ThreadPoolExecutor(SLOTS + 4)

    def usual(self) -> None:
        """What requests are compared with."""
        for _ in range(USUAL_REQUESTS):
            self._ask()
        self._up.until_metric(USUAL_REQUESTS, "tokenline_requests_total", outcome="ok")

    def engine_queue(self) -> str:
        """Every slot is taken when the request comes."""
        with self._crowd(SLOTS, tokens=50):
            return self._ask()

    def long_uncached_prompt(self) -> str:
        """Three times the usual prompt, none of it cached."""
        return self._ask(prompt=LONG_PROMPT)

    def large_batch(self) -> str:
        """The request shares each step with as many as there is room for, and waits for none of them."""
        with self._crowd(SLOTS - 1, tokens=60):
            return self._ask()

    def slow_client(self) -> str:
        """The client takes nothing of a long answer until the gateway has all of it."""
        with self._sent(tokens=400) as connection:
            ended = self._up.metric("tokenline_requests_total", outcome="ok")
            self._up.until_metric(ended + 1, "tokenline_requests_total", wait_s=30, outcome="ok")
            return _id_in(connection)

    def upstream_failure(self) -> str:
        """The first upstream, which no health check watches, answers to nothing; the second does."""
        return self._ask(model=FALLBACK_MODEL)

    def gateway_busy(self) -> str:
        """The worker gets no processor for a while, between a request's coming and its first token."""
        worker = self._up.child("worker")
        with httpx.Client(base_url=self._up.origin, trust_env=False) as other:
            other.get("/healthz")
            for _ in range(10):
                with self._sent(prompt=LONG_PROMPT) as connection:
                    # One loop serves both in turn: when this is answered, the request before it has been taken in.
                    for _ in range(2):
                        other.get("/healthz")
                    worker.send_signal(signal.SIGSTOP)
                    try:
                        too_late = bool(select.select([connection], [], [], 0)[0])
                        time.sleep(0 if too_late else BUSY_SECONDS)
                    finally:
                        worker.send_signal(signal.SIGCONT)
                    request_id = _id_in(connection)
                    if not too_late:
                        return request_id
        raise AssertionError("the worker could not be stopped before a first token")

    def close(self) -> None:
        self._pool.shutdown()

    def _body(self, **changes: Any) -> dict[str, Any]:
        fields = {"model": self._up.model, "prompt": USUAL_PROMPT, "tokens": USUAL_TOKENS} | changes
        return {
            "model": fields["model"],
            "messages": [{"role": "user", "content": fields["prompt"]}],
            "max_tokens": fields["tokens"],
            "stream": True,
        }

    def _ask(self, **changes: Any) -> str:
        answer = self._up.client.post("/v1/chat/completions", json=self._body(**changes))
        assert answer.status_code == 200, answer.text
        request_id: str = answer.headers["x-tokenline-request-id"]
        return request_id

    @contextmanager
    def _sent(self, **changes: Any) -> Iterator[socket.socket]:
        """A request on a connection of its own that takes little before it is read."""
        body = json.dumps(self._body(**changes)).encode()
        host, port = self._up.origin.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._up.key}\r\n"
            connection.sendall(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            yield connection

    @contextmanager
    def _crowd(self, count: int, tokens: int) -> Iterator[None]:
        """So many requests that decode, while the block runs."""
        running: list[Future[str]] = [self._pool.submit(self._ask, tokens=tokens) for _ in range(count)]
        self._until_running(count)
        yield
        for one in running:
            one.result()

    def _until_running(self, count: int) -> None:
        self._up.until_metric(count, "tokenline_engine_num_requests_running", wait_s=10)


def _id_in(connection: socket.socket) -> str:
    """The request id in an answer, which is read to its end."""
    taken = b""
    while data := connection.recv(65536):
        taken += data
    head = taken.lower().partition(b"\r\n\r\n")[0]
    names = (header.partition(b": ") for header in head.split(b"\r\n"))
    return next(value.decode() for name, _, value in names if name == b"x-tokenline-request-id")


CAUSES: dict[str, Callable[[Provoker], str]] = {
    "engine_queue": Provoker.engine_queue,
    "long_uncached_prompt": Provoker.long_uncached_prompt,
    "large_batch": Provoker.large_batch,
    "slow_client": Provoker.slow_client,
    "upstream_failure": Provoker.upstream_failure,
    "gateway_busy": Provoker.gateway_busy,
}
"""The cause that the verdict must name -> how it is provoked."""


@contextmanager
def provoker(folder: Path) -> Iterator[tuple[Provoker, Line]]:
    """A running Tokenline that has answered the usual requests."""
    with deaf_port() as dead_port:
        config = folder / "provoke.toml"
        config.write_text(SETTINGS.format(slots=SLOTS, dead_port=dead_port, model=FALLBACK_MODEL))
        with line(folder, "--config", str(config)) as up:
            found = Provoker(up)
            try:
                found.usual()
                yield found, up
            finally:
                found.close()


@contextmanager
def deaf_port() -> Iterator[int]:
    """A port whose queue of connections is full: whoever connects hears nothing, as from a machine that died."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(address)
            yield address[1]
        finally:
            for filler in fillers:
                filler.close()


def verdict_on(up: Line, request_id: str) -> dict[str, Any]:
    """`tokenline why ID --json`, once nothing more will become known of the request."""
    deadline = time.monotonic() + 15
    while True:
        found = up.why(request_id)
        if found.get("trace_complete") or time.monotonic() > deadline:
            verdict: dict[str, Any] = found["verdict"]
            return verdict
        time.sleep(0.2)


def main() -> int:
    """Provokes each cause and prints the verdict on it; 1 when one was not recognised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per cause")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="tokenline-causes-") as folder, provoker(Path(folder)) as (found, up):
        for cause, provoke in CAUSES.items():
            verdict = verdict_on(up, provoke(found))
            wrong += verdict["cause"] != cause
            if options.json:
                print(json.dumps({"provoked": cause, "verdict": verdict}), flush=True)
            else:
                mark = "right" if verdict["cause"] == cause else "WRONG"
                print(f"{mark}: provoked {cause}, named {verdict['cause']} ({verdict['confidence']})")
                print(f"  {verdict['text']}\n  {verdict['action']}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
