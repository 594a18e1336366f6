"""How many closed requests a second one observer takes on one core: frames in, metrics, join, store, access log.

`python -m benchmarks.observer_throughput [--rate 2000] [--seconds 10] [--spans]`. Without --rate it sends as fast as
the observer reads. The observer is pinned to one core, the sender to another. With --spans every request's four engine
spans come over OTLP too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import msgspec
import psutil
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.gateway import free_port
from protocol.timings import EngineMarks, EngineState, Timings
from settings.schema import Settings
from tracing.clock import host_identity
from tracing.ledger import Admitted, Attempt, Closed, FirstToken, Ledger, Outcome, Record, Usage, encode_record
from tracing.wire import frame

FRAME_REQUESTS = 20


def observe() -> None:
    """The process under measurement."""
    from settings.feed import Feed
    from tracing.observer.process import run_observer

    settings = Settings.model_validate_json(sys.argv[2])
    run_observer(Feed(settings), admin_key_hash=hashlib.sha256(b"benchmark").digest())


def ledger(number: int) -> Ledger:
    """A stream through the co-located engine, with every mark and in-band timings."""
    start = 10**12 + number * 10**6

    def at(ms: float) -> int:
        return start + round(ms * 1e6)

    trace_id, span_id = f"{number + 1:032x}", f"{number + 1:016x}"
    marks = EngineMarks(at(1.0), at(1.5), at(20.0), at(60.0), at(60.5), at(560.0))
    timings = Timings(
        prompt_n=128,
        prompt_ms=40.0,
        predicted_n=51,
        predicted_ms=500.0,
        tokenize_ms=0.5,
        queue_ms=18.5,
        steps=50,
        marks=marks,
        host=host_identity(),
        engine=EngineState(8, 2, 0.4, 8),
    )
    attempt = Attempt(
        1, "engine", "smollm2", f"{number + 2**40:016x}", at(0.5), at(0.5), at(0.8), at(60.7), at(60.8), at(561.0)
    )
    return Ledger(
        request_id=f"req_{number:024x}",
        trace_id=trace_id,
        span_id=span_id,
        wall_ns=time.time_ns(),
        ingress=start,
        surface="chat",
        method="POST",
        path="/api/v1/chat/completions",
        stream=True,
        model="smollm2",
        upstream="engine",
        key_alias="benchmark",
        authenticated=at(0.1),
        body_read=at(0.2),
        routed=at(0.3),
        admitted=at(0.4),
        attempts=[attempt],
        first_event=at(60.8),
        first_token=at(60.9),
        first_visible=at(60.9),
        first_token_written=at(61.0),
        last_token=at(560.8),
        upstream_end=at(561.0),
        finish=at(561.2),
        status=200,
        outcome=Outcome.OK,
        finish_reason="stop",
        token_events=51,
        usage=Usage(128, 51, 0, 0, "usage"),
        timings=timings,
    )


def frames(count: int) -> list[bytes]:
    """Everything that workers send of `count` requests, ready to be written."""
    made = []
    for first in range(0, count, FRAME_REQUESTS):
        records: list[Record] = []
        for number in range(first, min(first + FRAME_REQUESTS, count)):
            one = ledger(number)
            records += [
                Admitted(one.request_id, 0, one.model, one.surface, True, one.ingress),
                FirstToken(one.request_id, 0, one.model, one.upstream, one.surface, 61_000_000, one.trace_id),
                Closed(one),
            ]
        made.append(frame([encode_record(record) for record in records]))
    return made


def span_bodies(count: int) -> list[bytes]:
    """OTLP bodies with four engine spans of each request, as many requests to a body as to a frame."""
    bodies = []
    for first in range(0, count, FRAME_REQUESTS):
        body = ExportTraceServiceRequest()
        spans = body.resource_spans.add().scope_spans.add().spans
        for number in range(first, min(first + FRAME_REQUESTS, count)):
            trace_id, root = (number + 1).to_bytes(16, "big"), 2**50 + number * 8
            for step, name in enumerate(("llm_request", "queue", "prefill", "decode")):
                parent = number + 2**40 if step == 0 else root
                span = spans.add(trace_id=trace_id, span_id=(root + step).to_bytes(8, "big"), name=name)
                span.parent_span_id = parent.to_bytes(8, "big")
                span.start_time_unix_nano = span.end_time_unix_nano = time.time_ns()
                span.attributes.add(key="gen_ai.usage.output_tokens").value.int_value = 51
        bodies.append(body.SerializeToString())
    return bodies


def sample(page: str, series: str) -> float:
    """Sum of a metric's samples on the page."""
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(series))


def measure(rate: int | None, seconds: float, with_spans: bool) -> dict[str, object]:
    """One run; figures of the observer process alone."""
    count = round((rate or 6000) * seconds)
    to_send, bodies = frames(count), span_bodies(count) if with_spans else []
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        server = {"ops_port": free_port(), "otlp_port": free_port()}
        settings = Settings.model_validate({"state_dir": Path(folder), "server": server})
        command = [sys.executable, "-m", "benchmarks.observer_throughput", "observe", settings.model_dump_json()]
        with subprocess.Popen(command) as process:
            observer = psutil.Process(process.pid)
            observer.cpu_affinity(cores[-1:])
            os.sched_setaffinity(0, cores[:1])
            ops = httpx.Client(base_url=f"http://127.0.0.1:{server['ops_port']}", trust_env=False, timeout=30)
            while True:
                try:
                    ops.get("/healthz")
                    break
                except httpx.HTTPError:
                    time.sleep(0.1)
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(settings.intake_socket))
                cpu, began = observer.cpu_times(), time.perf_counter()
                for number, data in enumerate(to_send):
                    link.sendall(data)
                    if bodies:
                        ops.post(
                            settings.otlp_endpoint,
                            content=bodies[number],
                            headers={"content-type": "application/x-protobuf"},
                        )
                    if rate:
                        due = began + (number + 1) * FRAME_REQUESTS / rate
                        time.sleep(max(0.0, due - time.perf_counter()))
                while sample(ops.get("/metrics").text, "tokenline_requests_total") < count:
                    time.sleep(0.05)
                wall = time.perf_counter() - began
                time.sleep(1)  # the writer thread's last batches count too
                cpu_after = observer.cpu_times()
            page = ops.get("/metrics").text
            memory = observer.memory_info().rss
            process.terminate()
            process.wait()
        used = cpu_after.user + cpu_after.system - cpu.user - cpu.system
        return {
            "requests": count,
            "spans": with_spans,
            "offered_per_second": rate,
            "taken_per_second": round(count / wall),
            "cpu_us_per_request": round(used / count * 1e6),
            "core_share": round(used / wall, 2),
            "dropped": sample(page, "tokenline_traces_dropped_total"),
            "rss_mib": round(memory / 2**20),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--spans", action="store_true")
    options = parser.parse_args()
    print(json.dumps(msgspec.to_builtins(measure(options.rate, options.seconds, options.spans))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["observe"]:
        observe()
    else:
        main()
