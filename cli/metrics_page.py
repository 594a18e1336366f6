"""docs/metrics.md, made from the catalogue: `tokenline dashboards metrics > docs/metrics.md`."""

from __future__ import annotations

from tracing.metrics import (
    BATCH,
    BATCHED_TOKENS,
    COARSE,
    ENGINE,
    FINE_TPOT,
    FINE_TTFT,
    GATEWAY,
    GPU,
    TOKENS,
    Metric,
)

_BUCKETS = {
    FINE_TTFT: "fine, 1 ms - 120 s",
    FINE_TPOT: "fine, 1 ms - 10 s",
    COARSE: "coarse, 10 µs - 100 s",
    TOKENS: "1-2-5, 1 - 200,000",
    BATCH: "doubling, 1 - 1024",
    BATCHED_TOKENS: "1-2-5, 1 - 50,000",
}
_INTRODUCTION = """\
# Metrics

<!-- Made from tracing/metrics.py by `tokenline dashboards metrics`; a test keeps it current. -->

One page has all: `http://127.0.0.1:9464/metrics` (`server.ops_host`, `server.ops_port`), in Prometheus's text format or
in OpenMetrics. The observer adds the co-located engine's page to its own.

- Times are in seconds, shares from 0 to 1.
- Labels are bounded. At most 64 combinations of (model, upstream, surface) have series of their own; later ones are
  counted under `other`, models of requests that led nowhere under `unknown`. No label carries a request's id, a key or
  a user.
- Buckets are the same everywhere, so that series can be summed. `fine` has ten for each decade: P99 of log-normal
  latencies comes out within 7 %. `coarse` has 1, 2, 5. Shares of good requests are counted exactly, by
  `tokenline_slo_requests_total`, not read out of buckets.
- TTFT, TPOT and E2E carry exemplars (`trace_id`) of kept traces in OpenMetrics; Prometheus stores them with
  `--enable-feature=exemplar-storage`.
- Where each stage begins and ends: [timeline.md](timeline.md). Rules and dashboards made of these:
  [dashboards.md](dashboards.md).
"""
_SECTIONS = (
    ("Gateway", "", GATEWAY),
    ("Engine", "Suffixes are vLLM's, so that queries carry over.\n\n", ENGINE),
    ("GPU", "From NVML, once a second; absent where there is no GPU.\n\n", GPU),
)


def metrics_page() -> str:
    """The whole page."""
    head = "| metric | type | labels | buckets | meaning |\n|---|---|---|---|---|\n"
    parts = [_INTRODUCTION]
    for title, told, metrics in _SECTIONS:
        parts.append(f"## {title}\n\n{told}{head}" + "".join(_row(metric) for metric in metrics))
    return "\n".join(parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return (
        f"| `{metric.name}` | {metric.kind} | {labels} | {_BUCKETS.get(metric.buckets, '')} | "
        + metric.help.replace("|", "\\|")
        + " |\n"
    )
