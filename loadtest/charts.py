"""The charts of a run, by name: what each shows, before it is drawn."""

from __future__ import annotations

from typing import Any

from loadtest.compare import samples, stage_name
from loadtest.figures import quantile
from loadtest.plot import COLOURS, Bars, Chart, Series
from loadtest.server_side import LATE_STAGES
from tracing.metrics import PROMPT_SIZES, prompt_size_class

PARTS = {
    "gateway": ("auth", "route", "gateway_queue", "failed_attempts", "relay"),
    "link": ("receive", "connect", "send", "transit_out", "transit_back", "transit", "client_link"),
    "engine queue": ("engine_queue",),
    "prefill": ("engine_prefill",),
    "text": ("engine_tokenize", "engine_emit"),
    "not reported": ("upstream_wait", "unaccounted"),
}
"""Of TTFT: the server's stages, put together so that each can be seen."""
SHOWN_SHARE = 1.15
"""Of the largest P99: where the axis of a distribution ends, so that one straggler does not flatten it."""


def charts_of(run: dict[str, Any]) -> dict[str, Chart | Bars]:
    """Every chart that the run has data for; the names are fit for files."""
    names = [stage_name(stage) for stage in run["stages"]]
    values = [samples(run, place) for place in range(len(run["stages"]))]
    found: dict[str, Chart | Bars] = {}
    found |= _by_load(run)
    found["ttft-parts"] = _parts(run, names)
    for metric, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E")):
        found[f"{metric}-distribution"] = _distribution(title, names, [value[metric] for value in values])
    found["ttft-by-prompt"] = _by_prompt(run, names)
    return {**found, **_timelines(run)}


def _by_load(run: dict[str, Any]) -> dict[str, Chart | Bars]:
    stages = [stage for stage in run["stages"] if not stage.get("group")]
    loads = [float(stage["rate"] or stage["concurrency"]) for stage in stages]
    if len(set(loads)) < 2 or len(set(loads)) < len(loads) or len({bool(stage["rate"]) for stage in stages}) > 1:
        return {}
    x_name = "requests/s offered" if stages[0]["rate"] else "requests in flight"
    ordered = sorted(zip(loads, stages, strict=True), key=lambda one: one[0])

    def lines(metric: str) -> list[Series]:
        return [
            Series(label.upper(), [(load, s[metric][label]) for load, s in ordered if s[metric]["count"]], colour)
            for colour, label in enumerate(("p50", "p95", "p99"))
        ]

    throughput = Series("tokens/s", [(load, stage["tps"]) for load, stage in ordered if stage["tps"] is not None])
    places = sorted(loads)
    return {
        "throughput-by-load": Chart(
            "Throughput against load", x_name, "tokens/s", [throughput],
            "Where it no longer rises, the server is full.", places=places,
        ),
        "ttft-by-load": Chart("TTFT against load", x_name, "ms", lines("ttft_ms"), places=places),
        "tpot-by-load": Chart("TPOT against load", x_name, "ms", lines("tpot_ms"), places=places),
        "e2e-by-load": Chart("E2E against load", x_name, "ms", lines("e2e_ms"), places=places),
    }  # fmt: skip


def _parts(run: dict[str, Any], names: list[str]) -> Bars:
    """Means, because means of parts sum to the mean of the whole; percentiles do not."""
    told = [(name, stage) for name, stage in zip(names, run["stages"], strict=True) if stage["server_stages_ms"]]
    kinds = [
        (part, [_mean(stage, members) for _, stage in told], colour)
        for colour, (part, members) in enumerate(PARTS.items())
    ]
    what = "mean TTFT" if any(stage["ttft_ms"]["count"] for _, stage in told) else "what comes before decode"
    return Bars(
        "Where the first token's time goes", "ms", [name for name, _ in told], kinds,
        f"{what[0].upper()}{what[1:]} by the server's own account; means, since only they sum.",
    )  # fmt: skip


def _mean(stage: dict[str, Any], members: tuple[str, ...]) -> float:
    told = stage["server_stages_ms"]
    parts: list[float] = [
        told[name]["mean"] * told[name]["count"] / max(1, stage["e2e_ms"]["count"])
        for name in members
        if name in told and name not in LATE_STAGES and told[name]["mean"] is not None
    ]
    return sum(parts)


def _distribution(title: str, names: list[str], values: list[list[float]]) -> Chart:
    most = max((quantile(ordered, 0.99) for ordered in values if ordered), default=0.0) * SHOWN_SHARE
    least = min((ordered[0] for ordered in values if ordered), default=0.0)
    series = [
        Series(name, _steps(ordered, most), number % COLOURS)
        for number, (name, ordered) in enumerate(zip(names, values, strict=True))
        if ordered
    ]
    x_range = (min(least, most * 0.98), most) if most > 0 else None
    return Chart(f"{title}: share of requests within", "ms", "%", series, y_most=100, x_range=x_range)


def _steps(ordered: list[float], most: float) -> list[tuple[float, float]]:
    count = len(ordered)
    shown = [(value, 100 * (number + 1) / count) for number, value in enumerate(ordered) if value <= most]
    return [(ordered[0], 0.0), *shown] if shown else []


def _by_prompt(run: dict[str, Any], names: list[str]) -> Chart:
    requests = run["requests"]
    points: dict[int, list[tuple[float, float]]] = {}
    columns = ("stage", "prompt_tokens", "scheduled_us", "first_token_us", "error")
    for stage, tokens, due, first, error in zip(*(requests[name] for name in columns), strict=True):
        if tokens is not None and due is not None and first is not None and error is None:
            points.setdefault(stage, []).append((float(tokens), (first - due) / 1e3))
    series = [
        Series(names[stage] if stage < len(names) else "", found, stage % COLOURS, "dots")
        for stage, found in sorted(points.items())
    ]
    lengths = {tokens for one in series for tokens, _ in one.points}
    if not lengths:
        return Chart("", "", "", ())
    low, high = min(lengths), max(lengths)
    room = max(1.0, (high - low) * 0.04)
    note = f"Every prompt had {low:g} tokens." if low == high else ""
    title = "TTFT against the length of the prompt"
    places = (low,) if low == high else ()
    return Chart(title, "prompt tokens", "ms", series, note, x_range=(low - room, high + room), places=places)


def _timelines(run: dict[str, Any]) -> dict[str, Chart | Bars]:
    if "timeline" not in run:
        return {}
    seconds = run["timeline"]["seconds"]
    tps = [((n + 0.5) * seconds, value) for n, value in enumerate(run["timeline"]["tps"])]
    sampled = run["samples"]
    end = max([len(tps) * seconds, *(sample["at_ms"] / 1000 for sample in sampled)])
    bands = [(s["counted_from_us"] / 1e6, s["counted_to_us"] / 1e6) for s in run["stages"]]
    shared: dict[str, Any] = {"bands": bands, "x_range": (0.0, end), "is_wide": True}

    def curve(name: str, figure: str, colour: int, scale: float = 1.0, *, is_dashed: bool = False) -> Series:
        points = [(s["at_ms"] / 1000, s[figure] * scale) for s in sampled if figure in s]
        return Series(name, points, colour, is_dashed=is_dashed)

    shares = [
        curve("device busy", "busy", 0, 100), curve("GPU", "gpu_utilization", 1, 100),
        curve("memory bandwidth", "gpu_bandwidth", 2, 100), curve("KV cache", "kv_usage", 3, 100),
        curve("client's CPU", "client_cpu", 4, 100, is_dashed=True),
    ]  # fmt: skip
    queue = [
        curve("in flight", "in_flight", 0), curve("running in the engine", "running", 2),
        curve("waiting in the engine", "waiting", 5, is_dashed=True),
        curve("waiting to be sent", "waiting_to_send", 6, is_dashed=True),
    ]  # fmt: skip
    queue = [one for one in queue if any(value for _, value in one.points)]
    most = max([100.0, *(value for one in shares for _, value in one.points)])
    memory = curve("GPU memory", "gpu_memory_bytes", 3, 2**-30)
    found = {
        "tokens": Chart(
            "Throughput over time",
            "s",
            "tokens/s",
            [Series("tokens/s", tps, 0, "area")],
            "Shaded: what counts.",
            **shared,
        ),
        "busy": Chart("Busy shares over time", "s", "%", shares, y_most=most, **shared),
        "queue": Chart("Requests over time", "s", "requests", queue, **shared),
    }
    return {**found, "gpu-memory": Chart("GPU memory over time", "s", "GiB", [memory], **shared)}


def sizes_of(run: dict[str, Any]) -> list[tuple[str, int, list[float]]]:
    """By prompt-size class: how many requests, and their TTFTs in order."""
    found: dict[str, list[float]] = {}
    requests = run["requests"]
    columns = ("prompt_tokens", "scheduled_us", "first_token_us", "error")
    for tokens, due, first, error in zip(*(requests[name] for name in columns), strict=True):
        if tokens is not None and due is not None and first is not None and error is None:
            found.setdefault(prompt_size_class(tokens), []).append((first - due) / 1e3)
    order = [*(f"le_{bound}" for bound in PROMPT_SIZES), f"gt_{PROMPT_SIZES[-1]}"]
    return [(size, len(found[size]), sorted(found[size])) for size in order if size in found]
