"""Export with a backend that is slow, full or away: bounded, tried again, and what is lost is counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ledgers import WALL_NS, attempt, numbered, whole
from observer_rig import wait_until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry

from settings.schema import Settings
from tracing import semconv
from tracing.clock import FakeClock
from tracing.ledger import Closed, Ledger
from tracing.observer import export
from tracing.observer.core import Observer
from tracing.observer.export import Exporter
from tracing.spans import Span


class SlowBackend:
    """Answers `statuses` in turn (the last one from then on), each only once the gate is open."""

    def __init__(self, statuses: tuple[int, ...] = (200,)) -> None:
        self.gate = threading.Event()
        self.spans: list[str] = []
        self.asked = 0
        backend = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = statuses[min(backend.asked, len(statuses) - 1)]
                backend.asked += 1
                backend.gate.wait(20)
                if status == 200:
                    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                        backend.spans += [span.name for scope in resource.scope_spans for span in scope.spans]
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def exporting(backend: SlowBackend, **options: Any) -> Iterator[tuple[Exporter, Counter[str]]]:
    dropped: Counter[str] = Counter()

    def drop(reason: str, traces: int) -> None:
        dropped[reason] += traces

    exporter = Exporter(backend.url, **options)
    exporter.count_dropped(drop)
    try:
        yield exporter, dropped
    finally:
        backend.gate.set()
        exporter.close()
        backend.close()


def trace(number: int, spans: int = 10) -> list[Span]:
    return [Span(f"{number:032x}", f"{n:016x}", f"{number}.{n}", 1, 2) for n in range(1, spans + 1)]


def test_what_does_not_fit_is_left_out_by_the_trace_and_counted_and_what_fits_is_sent() -> None:
    backend = SlowBackend()
    with exporting(backend, max_queue_spans=100) as (exporter, dropped):
        exporter.export(trace(0, 100))
        wait_until(lambda: backend.asked == 1, "the backend is busy with the first batch")
        for number in range(1, 21):
            exporter.export(trace(number))
        assert dropped == {"export_queue_full": 10}
        with exporter.provider.get_tracer("ops").start_as_current_span("ops request"):
            pass
        assert dropped == {"export_queue_full": 11}, "a span of the ops application takes a place like any other"
        backend.gate.set()
        wait_until(lambda: len(backend.spans) == 200, "everything that was queued was sent")
        exporter.export(trace(30))
        wait_until(lambda: len(backend.spans) == 210, "and there is room again")
    sent = Counter(name.partition(".")[0] for name in backend.spans)
    assert set(sent.values()) == {10, 100}, "no trace in part"
    assert dropped == {"export_queue_full": 11}


def test_a_backend_that_is_busy_is_asked_again() -> None:
    backend = SlowBackend((503, 200))
    backend.gate.set()
    with exporting(backend) as (exporter, dropped):
        exporter.export(trace(1))
        wait_until(lambda: len(backend.spans) == 10, "the batch was sent in the end", 30)
    assert dropped == {}
    assert backend.asked == 2


def test_a_backend_that_refuses_costs_its_batch_and_is_counted() -> None:
    backend = SlowBackend((400, 200))
    backend.gate.set()
    with exporting(backend) as (exporter, dropped):
        exporter.export(trace(1))
        exporter.export(trace(2))
        wait_until(lambda: dropped["export_failed"] == 2, "both traces of the batch were counted")
        exporter.export(trace(3))
        wait_until(lambda: len(backend.spans) == 10, "the next batch is sent")


def test_a_backend_that_takes_nothing_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "CLOSE_SECONDS", 0.2)
    backend = SlowBackend()
    exporter = Exporter(backend.url)
    exporter.export(trace(1))
    wait_until(lambda: backend.asked == 1, "the sender waits for the backend")
    exporter.close()
    assert not backend.gate.is_set()
    backend.close()


class Told:
    """An exporter that keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def export(self, spans: list[Span]) -> None:
        self.spans += spans

    def count_dropped(self, dropped: Callable[[str, int], None]) -> None:
        """Nothing is."""

    def named(self, made: Ledger) -> list[tuple[str, bool]]:
        return sorted((s.name, semconv.DERIVED in s.attributes) for s in self.spans if s.trace_id == made.trace_id)


VLLM = {
    semconv.LATENCY_QUEUE: 0.01,
    semconv.LATENCY_PREFILL: 0.04,
    semconv.LATENCY_DECODE: 0.1,
    semconv.LATENCY_TTFT: 0.06,
}
GATEWAY = ["POST /v1/chat/completions", "auth", "chat m-upstream", "queue", "receive", "relay", "route"]


def engine_span(made: Ledger, **attributes: Any) -> Span:
    span_id = f"{int(made.attempts[-1].span_id, 16) + 5:016x}"
    return Span(made.trace_id, span_id, "llm_request", 10**18, 10**18 + 2 * 10**8, made.attempts[-1].span_id,
                attributes=attributes)  # fmt: skip


@pytest.fixture
def observer(tmp_path: Any) -> Iterator[tuple[Observer, Told, FakeClock]]:
    told, clock = Told(), FakeClock(wall=WALL_NS)
    settings = Settings.model_validate({"state_dir": tmp_path, "logging": {"level": "warning"}})
    made = Observer(settings, clock, CollectorRegistry(), told)  # type: ignore[arg-type]
    made.store.open()
    yield made, told, clock
    made.store.close()


@pytest.mark.parametrize("when", ["before the end", "after the end"])
def test_a_vllm_shaped_span_passes_through_with_derived_children_once(
    observer: tuple[Observer, Told, FakeClock], when: str
) -> None:
    watching, told, clock = observer
    made = numbered(1, timings=None)
    span = engine_span(made, **VLLM)
    if when == "before the end":
        watching.take_spans([span])
    watching.take_records([Closed(made)])
    watching.take_spans([span])
    watching.take_spans([span])
    for _ in range(30):
        clock.advance_ms(1000)
        watching.tick()
    watching.take_spans([span])
    watching.store.flush()
    expected = [*((name, False) for name in GATEWAY), ("llm_request", False),
                ("decode", True), ("prefill", True), ("queue", True)]  # fmt: skip
    assert told.named(made) == sorted(expected)
    assert len({s.span_id for s in told.spans}) == len(told.spans)
    (row,) = watching.store.find("req_1")
    assert row.timeline.sources["engine_prefill"] == "span"
    stages = watching.meters._histograms["tokenline_stage_duration_seconds"]
    assert _count(stages, stage="engine_prefill") == 1
    assert _count(stages, stage="upstream_wait") == 0


def _count(histogram: Any, **labels: str) -> float:
    (family,) = histogram.collect()
    found = [s for s in family.samples if s.name.endswith("_count") and labels.items() <= s.labels.items()]
    return sum(sample.value for sample in found)


def test_children_that_come_after_stand_ins_left_are_stored_and_not_exported(
    observer: tuple[Observer, Told, FakeClock],
) -> None:
    watching, told, clock = observer
    made = numbered(1, timings=None)
    span = engine_span(made, **VLLM)
    watching.take_records([Closed(made)])
    watching.take_spans([span])
    clock.advance_ms(1500)
    watching.tick()
    exported = len(told.spans)
    watching.take_spans([Span(made.trace_id, "e" * 16, "prefill", 10**18, 10**18 + 5, span.span_id)])
    watching.store.flush()
    assert len(told.spans) == exported
    assert sorted(s.name for s in watching.store.spans_of(made.trace_id)) == ["llm_request", "prefill"]


def test_an_engine_that_emits_its_own_is_exported_as_it_came(observer: tuple[Observer, Told, FakeClock]) -> None:
    watching, told, _ = observer
    made = numbered(1)
    span = engine_span(made, **VLLM)
    child = Span(made.trace_id, "e" * 16, "prefill", 10**18, 10**18 + 5, span.span_id)
    watching.take_records([Closed(made)])
    watching.take_spans([child, span])
    assert (span in told.spans, child in told.spans) == (True, True)
    assert not [s for s in told.spans if semconv.DERIVED in s.attributes]


def test_what_an_engine_says_in_band_stands_in_for_spans_that_never_come(
    observer: tuple[Observer, Told, FakeClock],
) -> None:
    watching, told, clock = observer
    in_band, mute = numbered(1), numbered(2, timings=None)
    header = numbered(3, timings=None, attempts=[attempt(server_timing="queue;dur=18, prefill;dur=45")])
    watching.take_records([Closed(in_band), Closed(mute), Closed(header)])
    clock.advance_ms(11_000)
    watching.tick()
    derived = [("decode", True), ("llm_request", True), ("prefill", True), ("queue", True), ("tokenize", True)]
    assert [s for s in told.named(in_band) if s[1]] == derived
    assert [s for s in told.named(mute) if s[1]] == []
    assert [s for s in told.named(header) if s[1]] == [("llm_request", True), ("prefill", True), ("queue", True)]
    watching.store.flush()
    assert watching.store.find("req_3")[0].timeline.sources["engine_queue"] == "header"
    assert watching.store.find("req_2")[0].timeline.sources["upstream_wait"] == "relay"


def test_slo_bands_and_lateness_are_fed_by_the_records(observer: tuple[Observer, Told, FakeClock]) -> None:
    watching, _, clock = observer
    for number in range(40):
        watching.take_records([Closed(numbered(number))])
    watching.take_records([Closed(numbered(50, first_token_written=2500.0))])
    late = whole(request_id="req_60", timings=None)
    watching.take_records([Closed(late)])
    clock.advance_ms(20_000)
    watching.tick()

    def counted(name: str) -> dict[tuple[str, ...], float]:
        (family,) = watching.meters._counters[name].collect()
        return {tuple(s.labels.values()): s.value for s in family.samples if s.value}

    assert counted("tokenline_slo_requests_total") == {
        ("m", "ttft", "good"): 40, ("m", "ttft", "bad"): 1, ("m", "tpot", "good"): 41,
    }  # fmt: skip
    assert counted("tokenline_band_requests_total")["m", "p99+"] == 1
    assert counted("tokenline_band_stage_seconds_total")["m", "p99+", "relay"] == pytest.approx(2.42)
