"""An observer that is killed under load, again and again, and what its store holds each time."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import httpx
import msgspec
from observer_rig import ObserverProcess, Start, WorkerLink, closing, engine_spans, here, wait_until

from tracing.observer.rows import decode_row
from tracing.spans import Span

SPANS = 3
"""Of the engine, in each trace."""
BATCH = 20
_spans = msgspec.msgpack.Decoder(list[Span]).decode


class Load:
    """Streams that end and the engine's spans of them, until the observer is gone."""

    def __init__(self) -> None:
        self.sent = 0

    def run(self, observer: ObserverProcess) -> None:
        link = WorkerLink(observer.settings.intake_socket)
        try:
            while True:
                made = [here(self.sent + number) for number in range(BATCH)]
                self.sent += BATCH
                observer.post_spans(*(span for one in made for span in engine_spans(one)[:SPANS]))
                link.send(*(record for one in made for record in closing(one)))
                time.sleep(0.01)
        except (OSError, httpx.HTTPError):
            return
        finally:
            link.close()


def kill_under_load(start: Start, rounds: int) -> None:
    """Kills the observer that often; each time its store opens again, and holds whole requests and traces alone."""
    load = Load()
    observer = start().wait_healthy()
    path = observer.settings.traces_path
    for _ in range(rounds):
        before = len(requests_in(path))
        loader = threading.Thread(target=load.run, args=(observer,))
        loader.start()
        wait_until(lambda: len(requests_in(path)) > before, "a batch was written")  # noqa: B023
        observer.kill()
        loader.join()
        kept = requests_in(path)
        assert observer.settings.intake_socket.exists(), "a killed process leaves its socket file"
        observer = start().wait_healthy()
        assert requests_in(path)[: len(kept)] == kept, "what was written before the kill is there"
        check_whole(path)
    link = WorkerLink(observer.settings.intake_socket)
    link.send(*closing(here(1_000_000)))
    assert observer.find("req_1000000")
    assert len(observer.find(kept[0], spans=1)[0]["spans"]) > SPANS
    assert observer.terminate() == 0


def requests_in(path: Path) -> list[str]:
    """The ids of the requests that are stored, in their order."""
    with sqlite3.connect(path) as connection:
        return [found for (found,) in connection.execute("SELECT request_id FROM requests ORDER BY id")]


def check_whole(path: Path) -> None:
    """Every row can be read, and of every trace all spans are there that came with it."""
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = connection.execute("SELECT request_id, trace_id, body FROM requests").fetchall()
        bodies = connection.execute(
            "SELECT traces.trace_id, spans.body FROM spans LEFT JOIN traces ON traces.seq = spans.trace_seq"
        ).fetchall()
    assert [decode_row(body).ledger.request_id for _, _, body in rows] == [request_id for request_id, _, _ in rows]
    spans: dict[str | None, set[str]] = {}
    for trace_id, body in bodies:
        spans.setdefault(trace_id, set()).update(span.span_id for span in _spans(body))
    assert spans.keys() <= {trace_id for _, trace_id, _ in rows}
    assert {len(found) for found in spans.values()} == {SPANS}
