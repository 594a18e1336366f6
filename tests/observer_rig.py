"""An observer in a process of its own, a worker that sends it frames, and a backend that takes its export."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from ledgers import numbered, timings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from settings.schema import Settings
from tracing.clock import host_identity
from tracing.ledger import Closed, FirstToken, Ledger, Record, WorkerState, encode_record
from tracing.observer.otlp import from_protobuf
from tracing.spans import Span
from tracing.wire import frame

ADMIN_KEY = "sk-admin-of-the-test"
ROOT = Path(__file__).parents[1]


def main() -> None:
    """Runs an observer with the settings in argv[1], one router of the caller's, and the console."""
    from fastapi import APIRouter

    from dashboards.console import console
    from settings.feed import Feed
    from tracing.observer.process import run_observer

    router = APIRouter(prefix="/extra")

    @router.get("")
    def extra() -> dict[str, str]:
        return {"from": "the caller"}

    settings = Settings.model_validate_json(sys.argv[1])
    key_hash = hashlib.sha256(ADMIN_KEY.encode()).digest()
    run_observer(Feed(settings), admin_key_hash=key_hash, routers=(router,), pages=console(key_hash))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(true: Callable[[], bool], what: str, seconds: float = 10) -> None:
    """Waits for a condition, and fails by its name."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.02)


class ObserverProcess:
    """One observer. Ports are free ones unless given; `environment` is added to ours."""

    def __init__(self, state_dir: Path, *, environment: dict[str, str] | None = None, **sections: Any) -> None:
        server = {"ops_port": free_port(), "otlp_port": free_port()} | sections.pop("server", {})
        self.settings = Settings.model_validate({"state_dir": state_dir, "server": server, **sections})
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.settings.model_dump_json()],
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": str(ROOT), **(environment or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{server['ops_port']}", timeout=5, trust_env=False)

    def wait_healthy(self) -> ObserverProcess:
        """Waits until the ops port answers."""
        wait_until(self._answers, "the ops port answers", 20)
        return self

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the observer ended with {self.process.returncode}: {self.process.communicate()[1]}")
        try:
            return self.http.get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def admin(self, path: str, key: str | None = ADMIN_KEY, **params: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        return self.http.get(f"/admin/v1{path}", params=params, headers=headers)

    def find(self, any_id: str, **params: Any) -> list[dict[str, Any]]:
        """Every match of an id; waits until there is one."""
        answer: list[httpx.Response] = []

        def found() -> bool:
            answer[:] = [self.admin(f"/requests/{any_id}", **params)]
            return answer[0].status_code == 200

        wait_until(found, f"{any_id} is found")
        matches: list[dict[str, Any]] = answer[0].json()["matches"]
        return matches

    def metrics(self, accept: str = "text/plain") -> str:
        answer = self.http.get("/metrics", headers={"accept": accept})
        assert answer.status_code == 200
        return answer.text

    def sample(self, series: str) -> float | None:
        """The value of one series as it is written on the page."""
        for line in self.metrics().splitlines():
            if line.startswith(series + " "):
                return float(line.rpartition(" ")[2])
        return None

    def post_spans(self, *spans: ProtoSpan) -> httpx.Response:
        body = ExportTraceServiceRequest()
        holder = body.resource_spans.add()
        holder.resource.attributes.add(key="service.name").value.string_value = "the-engine"
        holder.scope_spans.add().spans.extend(spans)
        return httpx.post(
            self.settings.otlp_endpoint,
            content=body.SerializeToString(),
            headers={"content-type": "application/x-protobuf"},
            trust_env=False,
        )

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=20)
        return self.process.returncode

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.communicate(timeout=20)

    def close(self) -> None:
        """Ends it however it is."""
        self.http.close()
        if self.process.poll() is None:
            self.kill()


Start = Callable[..., ObserverProcess]
"""Starts an observer with the options of ObserverProcess; `starting` ends it."""


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """Starts observers, one after another, over one state folder; all have ended after it."""
    running: list[ObserverProcess] = []

    def begin(**options: Any) -> ObserverProcess:
        running.append(ObserverProcess(folder / "state", **options))
        return running[-1]

    try:
        yield begin
    finally:
        for one in running:
            one.close()


class WorkerLink:
    """A relay worker's end of the intake socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        wait_until(path.exists, "the intake socket exists")
        self._socket.connect(str(path))

    def send(self, *records: Record) -> None:
        self._socket.sendall(frame([encode_record(record) for record in records]))

    def send_raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def hello(self, **inflight: int) -> None:
        self.send(WorkerState(0, os.getpid(), host_identity(), inflight, 0))

    def is_closed(self) -> bool:
        """Whether the observer closed it."""
        self._socket.settimeout(5)
        try:
            return self._socket.recv(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self._socket.close()


def here(number: int, **changes: Any) -> Ledger:
    """A good stream of an engine on this host, now."""
    return numbered(number, **{"timings": timings(host_identity()), "wall_ns": time.time_ns(), **changes})


def closing(made: Ledger) -> list[Record]:
    """What a worker sends of a stream that ended."""
    ttft_ns = made.first_token_written - made.ingress
    first = FirstToken(made.request_id, 0, made.model, made.upstream, made.surface, ttft_ns, made.trace_id)
    return [first, Closed(made)]


def engine_spans(made: Ledger) -> list[ProtoSpan]:
    """What the engine emits of a request: llm_request and three children."""
    base = int(made.attempts[-1].span_id, 16) << 8
    parents = (made.attempts[-1].span_id, *[f"{base + 1:016x}"] * 3)
    return [
        ProtoSpan(
            trace_id=bytes.fromhex(made.trace_id),
            span_id=(base + number).to_bytes(8, "big"),
            parent_span_id=bytes.fromhex(parent),
            name=name,
            start_time_unix_nano=made.wall_ns + number,
            end_time_unix_nano=made.wall_ns + number + 1000,
        )
        for number, (name, parent) in enumerate(
            zip(("llm_request", "queue", "prefill", "decode"), parents, strict=True), start=1
        )
    ]


class Backend:
    """An OTLP backend that keeps every span it was sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        backend = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                backend.spans.extend(from_protobuf(body).spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def of(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class FakeEngine:
    """A server on a Unix socket that answers (or never answers) GET with fixed pages."""

    def __init__(self, path: Path, pages: dict[str, tuple[str, bytes]], *, frozen: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._pages = pages
        self._frozen = frozen
        self.accepts: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        open_ones: list[socket.socket] = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            if self._frozen:
                open_ones.append(connection)
                continue
            with connection:
                head = b""
                while b"\r\n\r\n" not in head:
                    piece = connection.recv(65536)
                    if not piece:
                        break
                    head += piece
                if not head:
                    continue
                text = head.decode()
                self.accepts += [
                    line.partition(":")[2].strip() for line in text.splitlines() if line.lower().startswith("accept:")
                ]
                content_type, body = self._pages.get(text.split()[1], ("text/plain", b""))
                connection.sendall(
                    f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: {content_type}\r\n"
                    f"content-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
        for connection in open_ones:
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def lines_of(path: Path) -> Sequence[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
