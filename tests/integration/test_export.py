"""What an OTLP backend gets of a request: one trace, gateway and engine in it, no span twice."""

from collections import Counter
from pathlib import Path

from line_rig import line
from openai import OpenAI
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from otlp_rig import otlp_backend


def test_a_backend_gets_one_trace_with_gateway_and_engine_spans(tmp_path: Path) -> None:
    with (
        otlp_backend() as backend,
        line(tmp_path, "--device", "simulated", OTEL_EXPORTER_OTLP_ENDPOINT=backend.url) as up,
    ):
        trace_id, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
        client = OpenAI(base_url=up.base_url, api_key=up.key)
        stream = client.chat.completions.create(
            model=up.model,
            messages=[{"role": "user", "content": "a secret prompt"}],
            max_tokens=5,
            stream=True,
            extra_headers={"traceparent": f"00-{trace_id}-{caller}-01"},
        )
        assert len([chunk for chunk in stream if chunk.choices]) >= 5
        found = backend.trace(trace_id, until="llm_request")
        assert len({r.span.span_id for r in found}) == len(found)
        names = Counter((r.service, r.span.name) for r in found)
        assert set(names.values()) == {1}, names
        by_name = {r.span.name: r for r in sorted(found, key=lambda r: r.service == "tokenline-engine")}
        attempt_name = f"chat {up.model}"
        root, attempt, engine = (by_name[n] for n in ("POST /v1/chat/completions", attempt_name, "llm_request"))
        assert (root.span.kind, attempt.span.kind, engine.span.kind) == (
            Span.SPAN_KIND_SERVER,
            Span.SPAN_KIND_CLIENT,
            Span.SPAN_KIND_SERVER,
        )
        assert root.span.parent_span_id.hex() == caller
        assert attempt.span.parent_span_id == root.span.span_id
        assert engine.span.parent_span_id == attempt.span.span_id
        for name in ("auth", "receive", "route", "queue", "relay"):
            (ours,) = (r for r in found if (r.service, r.span.name) == (root.service, name))
            assert ours.span.parent_span_id == root.span.span_id
        for name in ("tokenize", "queue", "prefill", "decode"):
            child = by_name[name]
            assert child.span.parent_span_id == engine.span.span_id
            assert child.service == "tokenline-engine"
            assert "tokenline.derived" not in child.attributes
            assert engine.span.start_time_unix_nano <= child.span.start_time_unix_nano
            assert child.span.end_time_unix_nano <= engine.span.end_time_unix_nano
        assert by_name["queue"].span.end_time_unix_nano == by_name["prefill"].span.start_time_unix_nano
        assert by_name["prefill"].span.end_time_unix_nano == by_name["decode"].span.start_time_unix_nano
        assert root.span.start_time_unix_nano <= attempt.span.start_time_unix_nano
        assert attempt.span.start_time_unix_nano <= engine.span.start_time_unix_nano
        assert root.service == "tokenline-gateway"
        assert root.attributes["gen_ai.usage.output_tokens"] == 5
        assert not any("secret" in str(r.span) for r in found)
