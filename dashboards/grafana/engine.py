"""Engine: is the device kept busy, is there room, does the cache hit."""

from __future__ import annotations

from dashboards.grafana.board import MODEL, Board
from dashboards.grafana.panel import Panel, Query, Row
from dashboards.prometheus.promql import increase, mean, quantile, rate, selected, summed

RATE, RANGE = "$__rate_interval", "$__range"
E = "tokenline_engine_"
_NO_GPU = "the engine runs on no GPU"


def engine() -> Board:
    """Of our own engine and its GPUs."""
    return Board(
        "tokenline-engine",
        "The co-located engine: steps, queue, KV cache, GPU.",
        (
            Row("Device", _device()),
            Row("Requests", _requests()),
            Row("KV cache", _cache()),
            Row("Latency as the engine sees it", _latency()),
            Row("GPU", _gpu()),
            Row("What serves", _info()),
        ),
    )


def _quantiles(metric: str, *of: float) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, E + metric, RATE, MODEL), f"P{q * 100:g}") for q in of)


def _gauge(metric: str, legend: str = "{{model}}") -> Query:
    return Query(f"max by (model) ({selected(E + metric, MODEL)})", legend)


def _count(metric: str, legend: str, *by: str) -> Query:
    return Query(summed(rate(E + metric, RATE, MODEL), *by), legend)


def _device() -> tuple[Panel, ...]:
    gap, forward = _count("token_gap_seconds_sum", "").expr, _count("forward_seconds_total", "").expr
    return (
        Panel(
            "Busy", "Share of the last 10 s that the device spent in steps.", "percentunit", (_gauge("busy_ratio"),),
            maximum=1,
        ),
        Panel(
            "Token gap",
            "From the end of a step to the start of the next while requests run or wait.",
            "s",
            _quantiles("token_gap_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Share of gaps",
            "Gaps / (gaps + steps): what the host costs the device.",
            "percentunit",
            (Query(f"{gap} / ({gap} + {forward})", "gaps"),),
        ),
        Panel(
            "Batch size",
            "Sequences in a step: mean and P95.",
            "short",
            (Query(mean(f"{E}batch_size", RATE, MODEL), "mean"), *_quantiles("batch_size", 0.95)),
        ),
        Panel(
            "Tokens in a step",
            "Decodes and prefill chunks together: mean and P95. Chunks fill a step up to its budget.",
            "short",
            (Query(mean(f"{E}batched_tokens", RATE, MODEL), "mean"), *_quantiles("batched_tokens", 0.95)),
        ),
        Panel(
            "Host work for a step",
            "Means: building it, making its text, sampling and appending on the device; and making tokens of a prompt.",
            "s",
            tuple(
                Query(mean(f"{E}{name}_seconds", RATE, MODEL), name.replace("_", " "))
                for name in ("schedule", "detokenize", "slot_kernel", "tokenize")
            ),
        ),
    )  # fmt: skip


def _requests() -> tuple[Panel, ...]:
    return (
        Panel(
            "Running and waiting",
            "Requests in slots, and queued for one.",
            "short",
            (_gauge("num_requests_running", "running"), _gauge("num_requests_waiting", "waiting")),
        ),
        Panel(
            "Ended",
            "Requests that ended, by reason.",
            "reqps",
            (_count("request_success_total", "{{finished_reason}}", "finished_reason"),),
            stacked=True,
        ),
        Panel(
            "Tokens per second",
            "Prompt tokens of admitted requests, and tokens sampled.",
            "short",
            (_count("prompt_tokens_total", "prompt"), _count("generation_tokens_total", "generated")),
        ),
    )


def _cache() -> tuple[Panel, ...]:
    hits, looked_up = _count("prefix_cache_hits_total", "").expr, _count("prefix_cache_queries_total", "").expr
    return (
        Panel("KV pages in use", "Of all pages.", "percentunit", (_gauge("kv_cache_usage_ratio"),), maximum=1),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens found in the cache, counted once when a request is first admitted.",
            "percentunit",
            (Query(f"{hits} / {looked_up}", "hits"),),
            maximum=1,
        ),
        Panel(
            "Out of room",
            "Preemptions, evictions of cached pages, steps out of memory: per second.",
            "short",
            (
                _count("num_preemptions_total", "preemptions"),
                _count("prefix_cache_evictions_total", "evictions"),
                _count("oom_total", "out of memory"),
            ),
        ),
    )


def _latency() -> tuple[Panel, ...]:
    return (
        Panel("Queue", "Queued to first scheduled.", "s", _quantiles("request_queue_time_seconds", 0.5, 0.95, 0.99)),
        Panel(
            "Prefill",
            "First scheduled to first token sampled.",
            "s",
            _quantiles("request_prefill_time_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Decode",
            "First token sampled to last token sampled.",
            "s",
            _quantiles("request_decode_time_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "First token",
            "Received by the engine to first token sampled.",
            "s",
            _quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Between tokens",
            "Time between two tokens of a request.",
            "s",
            _quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Whole request",
            "Received to last token sampled.",
            "s",
            _quantiles("e2e_request_latency_seconds", 0.5, 0.95, 0.99),
        ),
    )


def _gpu() -> tuple[Panel, ...]:
    def gpu(title: str, told: str, unit: str, metric: str) -> Panel:
        return Panel(title, told, unit, (Query(f"tokenline_gpu_{metric}", "{{gpu}}", silent_when_well=_NO_GPU),))

    return (
        gpu("GPU utilization", "Share of the last second in which any kernel ran.", "percentunit", "utilization_ratio"),
        gpu("GPU memory", "In use, by all processes.", "bytes", "memory_used_bytes"),
        gpu("GPU memory busy", "Share of time, not of bandwidth.", "percentunit", "memory_busy_ratio"),
        gpu(
            "Memory bandwidth",
            "Of the possible; only where the GPU measures it.",
            "percentunit",
            "dram_bandwidth_ratio",
        ),
        gpu("Power", "Drawn by the GPU.", "watt", "power_watts"),
    )


def _info() -> tuple[Panel, ...]:
    return (
        Panel(
            "What serves",
            "Device, dtype, asynchronous scheduling, slot reuse, chunked prefill.",
            "none",
            (Query(f"{E}info{{{MODEL}}}", "{{model}}", instant=True),),
            "table",
            12,
        ),
        Panel(
            "Advice",
            "Settings that hold the engine back by its own data; docs/advice.md.",
            "none",
            (Query(f"{E}advice{{{MODEL}}} == 1", "{{advice}}", instant=True, silent_when_well="there is no advice"),),
            "table",
            6,
        ),
        Panel(
            "Requests in range",
            "Requests that ended in the whole range, by reason.",
            "short",
            (Query(summed(increase(f"{E}request_success_total", RANGE, MODEL), "finished_reason"),
                   "{{finished_reason}}", instant=True),),
            "bargauge",
            6,
        ),
    )  # fmt: skip
