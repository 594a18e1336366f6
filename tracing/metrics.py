"""The metrics catalogue: every metric's name, type, labels, buckets and meaning, defined once.

The observer and the engine make their prometheus_client objects from it (`tracing.instruments`); documentation and
dashboards are checked against it. Seconds and ratios only; no label carries a request id, a key or a user.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from prometheus_client import disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]

Kind = Literal["counter", "gauge", "histogram", "info"]


def _decades(steps: tuple[float, ...], low: float, high: float) -> tuple[float, ...]:
    """Bucket bounds: `steps` of each decade from low to high, both included."""
    bounds = [float(f"{step * 10**exponent:.6g}") for exponent in range(-6, 6) for step in steps]
    return tuple(bound for bound in bounds if low <= bound <= high)


_FINE_STEPS = (1, 1.25, 1.6, 2, 2.5, 3.15, 4, 5, 6.3, 8)
FINE_TTFT = (*_decades(_FINE_STEPS, 0.001, 100), 120.0)
"""1 ms to 120 s: puts the P99 of log-normal latencies within 7 %."""
FINE_TPOT = _decades(_FINE_STEPS, 0.001, 10)
COARSE = _decades((1, 2, 5), 1e-5, 100)
TOKENS = _decades((1, 2, 5), 1, 200_000)
BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
BATCHED_TOKENS = _decades((1, 2, 5), 1, 50_000)


class Metric(msgspec.Struct, frozen=True):
    """One entry of the catalogue. `name` is as exposed, `_total` of counters included."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_ROUTE = ("model", "upstream", "surface")

GATEWAY: tuple[Metric, ...] = (
    Metric(
        "gen_ai_server_time_to_first_token_seconds",
        "histogram",
        "TTFT: first token written to the client minus ingress; streams only.",
        _ROUTE,
        FINE_TTFT,
    ),
    Metric(
        "gen_ai_server_time_per_output_token_seconds",
        "histogram",
        "TPOT: (last token - first token) / (output tokens - 1); count says what counted the tokens.",
        (*_ROUTE, "count"),
        FINE_TPOT,
    ),
    Metric(
        "gen_ai_server_request_duration_seconds",
        "histogram",
        "E2E: last byte written to the client minus ingress.",
        _ROUTE,
        FINE_TTFT,
    ),
    Metric(
        "tokenline_slo_requests_total",
        "counter",
        "Requests that met an objective of [slo] (good) or not (bad); a waiting request is bad once its time passed.",
        ("model", "slo", "result"),
    ),
    Metric(
        "tokenline_oldest_waiting_seconds",
        "gauge",
        "Age of the oldest request without a first token.",
        ("model",),
    ),
    Metric(
        "tokenline_band_requests_total",
        "counter",
        "Requests by the band of their TTFT in the rolling distribution of their model (p0-50, p50-95, p95-99, p99+).",
        ("model", "band"),
    ),
    Metric(
        "tokenline_band_stage_seconds_total",
        "counter",
        "Seconds by stage of the requests in each band: tail attribution.",
        ("model", "band", "stage"),
    ),
    Metric(
        "tokenline_event_loop_lag_seconds",
        "histogram",
        "How late the event loop of a relay worker ran its ticks.",
        ("worker",),
        COARSE,
    ),
    Metric(
        "tokenline_client_rtt_seconds",
        "histogram",
        "Round trip of the client's connection (TCP_INFO, smoothed).",
        (),
        COARSE,
    ),
    Metric(
        "tokenline_client_backpressure_seconds",
        "histogram",
        "Time in which a stream's written bytes had not been taken by the client.",
        (),
        COARSE,
    ),
    Metric(
        "tokenline_abort_propagation_seconds",
        "histogram",
        "Client gone to engine freed, or to upstream closed where the engine does not say.",
        ("upstream",),
        COARSE,
    ),
    Metric("tokenline_wasted_tokens_total", "counter", "Tokens made after the client had left.", ("upstream",)),
    Metric("tokenline_queue_depth", "gauge", "Requests that wait for admission in the gateway."),
    Metric(
        "tokenline_stage_duration_seconds",
        "histogram",
        "Time in each stage of a request; see docs/timeline.md for where each begins and ends.",
        ("stage", "upstream"),
        COARSE,
    ),
    Metric(
        "tokenline_ttft_by_prompt_size_seconds",
        "histogram",
        "TTFT by prompt-size class: up to 256, 1024 and 4096 tokens, and more.",
        ("model", "size"),
        COARSE,
    ),
    Metric("tokenline_prompt_tokens", "histogram", "Prompt tokens of a request.", ("model",), TOKENS),
    Metric("tokenline_output_tokens", "histogram", "Output tokens of a request.", ("model",), TOKENS),
    Metric(
        "tokenline_ttft_unaccounted_seconds",
        "histogram",
        "TTFT minus the sum of its measured stages, absolute value; same-host engines only.",
        ("upstream",),
        COARSE,
    ),
    Metric(
        "tokenline_gateway_overhead_seconds",
        "histogram",
        "E2E minus the union of upstream attempts, the client's upload and the gateway's queue.",
        ("upstream",),
        COARSE,
    ),
    Metric(
        "tokenline_requests_total",
        "counter",
        "Requests that ended.",
        (*_ROUTE, "outcome", "status"),
    ),
    Metric(
        "tokenline_tokens_total",
        "counter",
        "Tokens by direction (input, cached, output, reasoning), as upstreams counted them.",
        ("direction", "model", "team"),
    ),
    Metric("tokenline_inflight_requests", "gauge", "Requests now at each upstream.", ("upstream",)),
    Metric(
        "tokenline_inflight_places",
        "gauge",
        "Requests that a relay worker lets be in flight at once: its share of server.max_concurrent_requests.",
        ("worker",),
    ),
    Metric("tokenline_rejections_total", "counter", "Requests refused by the gateway.", ("reason",)),
    Metric(
        "tokenline_limits_degraded",
        "gauge",
        "1 while limits are not shared: Redis can't be asked, or workers have no memory in common.",
    ),
    Metric("tokenline_upstream_up", "gauge", "1 when the upstream's last health check passed.", ("upstream",)),
    Metric(
        "tokenline_breaker_state",
        "gauge",
        "Breaker of each upstream: 0 closed, 1 half open, 2 open (the worst of all workers).",
        ("upstream",),
    ),
    Metric("tokenline_attempts_total", "counter", "Attempts at upstreams by result.", ("upstream", "result")),
    Metric(
        "tokenline_timing_anomalies_total",
        "counter",
        "Intervals that came out negative, by stage.",
        ("kind",),
    ),
    Metric(
        "tokenline_tpot_skipped_total",
        "counter",
        "Streams without a TPOT sample, by reason: several choices in one stream have no token gap of their own.",
        ("reason",),
    ),
    Metric(
        "tokenline_ledgers_dropped_total",
        "counter",
        "Requests whose record was lost because the observer was away or too slow.",
    ),
    Metric("tokenline_traces_dropped_total", "counter", "Traces not stored, by reason.", ("reason",)),
    Metric("tokenline_traces_kept_total", "counter", "Traces whose spans were stored."),
    Metric(
        "tokenline_config_reloads_total",
        "counter",
        "Reloads of the configuration while processes run; failed: what was in force before stays so.",
        ("result",),
    ),
    Metric(
        "tokenline_config_last_success_timestamp_seconds",
        "gauge",
        "When the configuration in force was read (seconds since 1970).",
    ),
    Metric("tokenline_spans_received_total", "counter", "Spans taken by the OTLP receiver.", ("result",)),
)

_E = "tokenline_engine_"

ENGINE: tuple[Metric, ...] = (
    Metric(_E + "num_requests_running", "gauge", "Requests in slots.", ("model",)),
    Metric(_E + "num_requests_waiting", "gauge", "Requests queued for a slot.", ("model",)),
    Metric(_E + "kv_cache_usage_ratio", "gauge", "KV pages in use, 0 to 1.", ("model",)),
    Metric(
        _E + "prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up in the prefix cache, once for each request, when it is first admitted.",
        ("model",),
    ),
    Metric(_E + "prefix_cache_hits_total", "counter", "Those of them that were found there.", ("model",)),
    Metric(
        _E + "prefix_cache_evictions_total",
        "counter",
        "Cached KV pages that were given to another use.",
        ("model",),
    ),
    Metric(
        _E + "num_preemptions_total",
        "counter",
        "Requests put out of the batch for want of KV pages, to be computed again.",
        ("model",),
    ),
    Metric(_E + "oom_total", "counter", "Steps that ran out of device memory.", ("model",)),
    Metric(_E + "prompt_tokens_total", "counter", "Prompt tokens of admitted requests.", ("model",)),
    Metric(_E + "generation_tokens_total", "counter", "Tokens sampled for answers.", ("model",)),
    Metric(
        _E + "request_success_total",
        "counter",
        "Requests that ended, by reason: stop, length, abort, error.",
        ("model", "finished_reason"),
    ),
    Metric(
        _E + "time_to_first_token_seconds",
        "histogram",
        "Received by the engine to first token sampled.",
        ("model",),
        FINE_TTFT,
    ),
    Metric(
        _E + "inter_token_latency_seconds",
        "histogram",
        "Time between two tokens of a request.",
        ("model",),
        FINE_TPOT,
    ),
    Metric(
        _E + "request_queue_time_seconds",
        "histogram",
        "Queued to first scheduled.",
        ("model",),
        COARSE,
    ),
    Metric(
        _E + "request_prefill_time_seconds",
        "histogram",
        "First scheduled to first token sampled.",
        ("model",),
        COARSE,
    ),
    Metric(
        _E + "request_decode_time_seconds",
        "histogram",
        "First token sampled to last token sampled.",
        ("model",),
        COARSE,
    ),
    Metric(
        _E + "e2e_request_latency_seconds",
        "histogram",
        "Received by the engine to last token sampled.",
        ("model",),
        FINE_TTFT,
    ),
    Metric(_E + "forward_seconds_total", "counter", "Time that the device spent in steps.", ("model",)),
    Metric(
        _E + "token_gap_seconds",
        "histogram",
        "Step start minus the previous step's end while any request ran or waited.",
        ("model",),
        COARSE,
    ),
    Metric(
        _E + "busy_ratio",
        "gauge",
        "Share of the last 10 s of wall time that the device spent in steps.",
        ("model",),
    ),
    Metric(_E + "batch_size", "histogram", "Sequences in a step.", ("model",), BATCH),
    Metric(_E + "batched_tokens", "histogram", "Tokens in a step.", ("model",), BATCHED_TOKENS),
    Metric(
        _E + "schedule_seconds",
        "histogram",
        "Host time to build a step.",
        ("model",),
        COARSE,
    ),
    Metric(
        _E + "slot_kernel_seconds",
        "histogram",
        "Part of a step in which tokens were sampled and appended.",
        ("model",),
        COARSE,
    ),
    Metric(
        _E + "tokenize_seconds",
        "histogram",
        "Time to turn one prompt into tokens: chat template and encoding, without waiting for them.",
        ("model",),
        COARSE,
    ),
    Metric(
        _E + "detokenize_seconds",
        "histogram",
        "Host time to turn one step's tokens into text.",
        ("model",),
        COARSE,
    ),
    Metric(
        _E + "advice",
        "gauge",
        "1 while the engine's own data says that the setting named by the label holds it back; see docs/advice.md.",
        ("model", "advice"),
    ),
    Metric(
        _E + "info",
        "info",
        "What serves: device, dtype, simulated, async_scheduling, slot_reuse, chunked_prefill.",
        ("model",),
    ),
)

_G = "tokenline_gpu_"

GPU: tuple[Metric, ...] = (
    Metric(_G + "utilization_ratio", "gauge", "Share of the last second in which any kernel ran (NVML).", ("gpu",)),
    Metric(_G + "memory_used_bytes", "gauge", "Device memory in use, by all processes (NVML).", ("gpu",)),
    Metric(
        _G + "memory_busy_ratio",
        "gauge",
        "Share of the last second in which memory was read or written (NVML): time, not bandwidth.",
        ("gpu",),
    ),
    Metric(
        _G + "dram_bandwidth_ratio",
        "gauge",
        "Memory bandwidth used, of the possible; only where the GPU measures it (NVML GPM).",
        ("gpu",),
    ),
    Metric(_G + "power_watts", "gauge", "Power drawn (NVML).", ("gpu",)),
)
"""Published by the engine where it runs on a GPU, and absent elsewhere."""

CATALOGUE: tuple[Metric, ...] = GATEWAY + ENGINE + GPU

PROMPT_SIZES = (256, 1024, 4096)
"""Upper bounds in tokens of the prompt-size classes; above the last is the fourth class."""


def prompt_size_class(tokens: int) -> str:
    """The class of a prompt: `le_256`, `le_1024`, `le_4096` or `gt_4096`."""
    for bound in PROMPT_SIZES:
        if tokens <= bound:
            return f"le_{bound}"
    return f"gt_{PROMPT_SIZES[-1]}"
