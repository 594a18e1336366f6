"""A run as one page that needs nothing else: a table, charts, what went wrong and what to know."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Any

from loadtest.compare import samples, stage_name
from loadtest.plot import Series, chart

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 940px; margin: 2rem auto; padding: 0 1rem; }
body { color: #1c2430; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; margin: .8rem 0; } .title { font: 600 14px system-ui, sans-serif; fill: currentColor; }
.tick { font: 11px system-ui, sans-serif; fill: currentColor; } .grid { stroke: #8884; }
.error { color: #b3261e; } dd { margin-left: 1rem; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { color: #e4e8ee; background: #14181f; } .error { color: #ff8a80; } }
"""


def report(run: dict[str, Any]) -> str:
    """The page of a run or a sampling, in HTML."""
    started = datetime.fromtimestamp(run["started_unix_ms"] / 1000, UTC)
    names = [f"{number}: {stage_name(stage)}" for number, stage in enumerate(run["stages"], 1)]
    values = [samples(run, place) for place in range(len(run["stages"]))]
    parts = [
        f"<h1>{escape(run['model'])} at {escape(run['base_url'])}</h1>",
        f"<p>{escape(run['kind'])} {escape(run['run'])}, {started:%Y-%m-%d %H:%M:%S} UTC. "
        f"Prompts {escape(run['prompt_lengths'])}. Output tokens by {escape(run['token_counts'])}.</p>",
        _stopped(run),
        _table(run, names),
        _found(run),
        "<h2>Charts</h2>",
        _by_load(run),
        *(_cdf(title, names, [value[metric] for value in values]) for title, metric in _CDFS),
        _by_prompt(run),
        _timeline(run),
    ]
    title = escape(f"{run['run']}: {run['model']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


_CDFS = (
    ("TTFT: share of requests that waited at most so long", "ttft"),
    ("TPOT: share of requests", "tpot"),
    ("E2E: share of requests", "e2e"),
)


def _stopped(run: dict[str, Any]) -> str:
    return f'<p class="error">It ended before its time: {escape(run["stopped"])}.</p>' if run["stopped"] else ""


def _table(run: dict[str, Any], names: list[str]) -> str:
    heads = ("stage", "tokens/s", "requests/s", "TTFT P50", "P95", "P99", "TPOT P50", "P99", "E2E P50", "P99", "failed")
    rows = []
    for name, stage in zip(names, run["stages"], strict=True):
        ttft, tpot, e2e = stage["ttft_ms"], stage["tpot_ms"], stage["e2e_ms"]
        times = (ttft["p50"], ttft["p95"], ttft["p99"], tpot["p50"], tpot["p99"], e2e["p50"], e2e["p99"])
        cells = [
            name,
            *(_number(value) for value in (stage["tps"], stage["rps"], *times)),
            f"{stage['errors']} of {stage['requests']}",
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{text}</th>" for text in heads)
    return (
        f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div><p>Times in ms, from the schedule.</p>'
    )


def _found(run: dict[str, Any]) -> str:
    """The verdict: failures, oddities, health rules, notes."""
    lines = []
    for entry in run["explained"]:
        style = ' class="error"' if entry["what"] == "error" else ""
        example = f" Such as: {entry['example']}" if entry["example"] else ""
        lines.append(
            f"<dd{style}>{entry['count']} × {escape(entry['kind'])}: {escape(entry['meaning'] + '.' + example)}</dd>"
        )
    for rule in run.get("health", []):
        style = ' class="error"' if rule["result"] == "fail" else ""
        lines.append(
            f"<dd{style}>{escape(rule['result'])}, {escape(rule['group'])}: "
            f"{escape(rule['rule'])} ({escape(rule['seen'])})</dd>"
        )
    lines += [f"<dd>{escape(note)}</dd>" for note in run["notes"]]
    return "<h2>What to know</h2><dl>" + ("".join(lines) or "<dd>Nothing out of the ordinary.</dd>") + "</dl>"


def _by_load(run: dict[str, Any]) -> str:
    stages = [stage for stage in run["stages"] if not stage.get("group") and stage["ttft_ms"]["count"]]
    if len(stages) < 2 or len({bool(stage["rate"]) for stage in stages}) > 1:
        return ""
    loads = sorted((stage["rate"] or stage["concurrency"], stage) for stage in stages) if _distinct(stages) else []
    if not loads:
        return ""
    name = "requests/s offered" if stages[0]["rate"] else "requests in flight"
    lines = [
        Series(f"TTFT {label.upper()}", [(float(load), stage["ttft_ms"][label]) for load, stage in loads])
        for label in ("p50", "p95", "p99")
    ]
    throughput = Series("tokens/s", [(float(load), stage["tps"] or 0.0) for load, stage in loads], on_right=True)
    return chart("Latency and throughput against load", name, "ms", [*lines, throughput], "tokens/s")


def _distinct(stages: list[dict[str, Any]]) -> bool:
    loads = [stage["rate"] or stage["concurrency"] for stage in stages]
    return len(set(loads)) == len(loads)


def _cdf(title: str, names: list[str], values: list[list[float]]) -> str:
    series = [
        Series(name, [(value, (number + 1) / len(ordered)) for number, value in enumerate(ordered)])
        for name, ordered in zip(names, values, strict=True)
        if ordered
    ]
    return chart(title, "ms", "share", series)


def _by_prompt(run: dict[str, Any]) -> str:
    requests = run["requests"]
    columns = ("prompt_tokens", "scheduled_us", "first_token_us", "error")
    points = [
        (float(tokens), (first - due) / 1e3)
        for tokens, due, first, error in zip(*(requests[name] for name in columns), strict=True)
        if tokens is not None and due is not None and first is not None and error is None
    ]
    return chart("TTFT against the length of the prompt", "prompt tokens", "ms", [Series("requests", points, "dots")])


def _timeline(run: dict[str, Any]) -> str:
    if "timeline" not in run:
        return ""
    seconds = run["timeline"]["seconds"]
    tps = Series("tokens/s", [((n + 0.5) * seconds, value) for n, value in enumerate(run["timeline"]["tps"])])
    sampled = run["samples"]

    def curve(name: str, figure: str, scale: float = 1.0) -> Series:
        points = [(s["at_ms"] / 1000, s[figure] * scale) for s in sampled if figure in s]
        return Series(name, points, on_right=figure != "tokens")

    shares = [
        curve("device busy %", "busy", 100),
        curve("GPU %", "gpu_utilization", 100),
        curve("KV %", "kv_usage", 100),
    ]
    load = [curve("in flight", "in_flight"), curve("waiting in the engine", "waiting")]
    left = [Series(one.name, one.points) for one in load]
    return chart("Throughput, and what the engine was doing", "s", "tokens/s", [tps, *shares], "%") + chart(
        "In flight, and waiting in the engine", "s", "requests", left
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
