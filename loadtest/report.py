"""A run as one page that needs nothing else: what it says, its figures, its charts. Light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

from loadtest.charts import charts_of, sizes_of
from loadtest.compare import stage_name
from loadtest.figures import quantile
from loadtest.plot import draw
from loadtest.reading import remarks
from loadtest.report_style import PAGE

WIDE = ("tokens", "busy", "queue", "gpu-memory")
"""Charts over time: one below the other, so that what happened at once lies at once."""


def report(run: dict[str, Any]) -> str:
    """The page of a run or a sampling, in HTML."""
    started = datetime.fromtimestamp(run["started_unix_ms"] / 1000, UTC)
    kind = "Sampling" if run["kind"] == "sample" else "Load test"
    parts = [
        f'<header><p class="kind">{kind} {escape(run["run"])}</p><h1>{escape(run["model"])}</h1>'
        f'<p class="facts">{escape(run["base_url"])} · {started:%Y-%m-%d %H:%M} UTC · prompts '
        f"{escape(run['prompt_lengths'])} · output tokens by {escape(run['token_counts'])}</p></header>",
        _cards(run),
        _verdict(run),
        _table(run),
        _sizes(run),
        _server_stages(run),
        _charts(run),
        _explained(run),
        _footer(run),
    ]
    title = escape(f"{run['run']}: {run['model']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{PAGE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _cards(run: dict[str, Any]) -> str:
    """The figures of the stage with the most load, large."""
    if not run["stages"]:
        return ""
    stage = max(run["stages"], key=lambda one: one["rate"] or one["concurrency"])
    cards = [
        ("tokens/s", stage["tps"], ""),
        ("requests/s", stage["rps"], ""),
        ("TTFT P50", stage["ttft_ms"]["p50"], "ms"),
        ("TTFT P99", stage["ttft_ms"]["p99"], "ms"),
        ("TPOT P50", stage["tpot_ms"]["p50"], "ms"),
        ("TPOT P99", stage["tpot_ms"]["p99"], "ms"),
    ]
    drawn = "".join(
        f'<div class="card"><span>{name}</span><b>{_number(value)}<i>{unit if value is not None else ""}</i></b></div>'
        for name, value, unit in cards
    )
    of = f'<p class="of">{escape(stage_name(stage))}, {stage["counted_seconds"]:.3g} s counted</p>'
    return f'<section class="cards">{drawn}</section>{of}'


def _verdict(run: dict[str, Any]) -> str:
    lines = "".join(f'<li class="{one.mood}">{escape(one.text)}</li>' for one in remarks(run))
    notes = "".join(f'<li class="plain">{escape(note[0].upper() + note[1:])}</li>' for note in run["notes"] if note)
    return f'<section><h2>What it says</h2><ul class="verdict">{lines}{notes}</ul></section>'


def _table(run: dict[str, Any]) -> str:
    heads = (
        "",
        "tokens/s",
        "requests/s",
        "TTFT P50",
        "P95",
        "P99",
        "TPOT P50",
        "P95",
        "P99",
        "E2E P50",
        "P99",
        "failed",
    )
    rows = []
    for stage in run["stages"]:
        ttft, tpot, e2e = stage["ttft_ms"], stage["tpot_ms"], stage["e2e_ms"]
        times = (*(ttft[p] for p in _SHOWN), *(tpot[p] for p in _SHOWN), e2e["p50"], e2e["p99"])
        failed = f"{stage['errors']} of {stage['requests']}"
        cells = (_number(value) for value in (stage["tps"], stage["rps"], *times))
        rows.append((stage_name(stage), *cells, failed))
    return _section("Figures", _grid(heads, rows), "Times in ms, from the instant at which a request was due.")


_SHOWN = ("p50", "p95", "p99")


def _sizes(run: dict[str, Any]) -> str:
    found = sizes_of(run)
    if not found:
        return ""
    total = sum(count for _, count, _ in found)
    rows = [
        (
            _size_name(size),
            str(count),
            f"{count / total:.0%}",
            *(_number(quantile(ttfts, p)) for p in (0.5, 0.95, 0.99)),
        )
        for size, count, ttfts in found
    ]
    return _section("TTFT by prompt size", _grid(("tokens", "requests", "share", "P50", "P95", "P99"), rows), "")


def _size_name(size: str) -> str:
    kind, bound = size.split("_")
    return f"up to {int(bound):,}" if kind == "le" else f"over {int(bound):,}"


def _server_stages(run: dict[str, Any]) -> str:
    told = [(stage_name(stage), stage["server_stages_ms"]) for stage in run["stages"] if stage["server_stages_ms"]]
    if not told:
        return ""
    heads = ("", *(head for name, _ in told for head in (f"{name}: P50", "P99")))
    rows = []
    for part in dict.fromkeys(name for _, stages in told for name in stages):
        cells = (stages.get(part, {}).get(figure) for _, stages in told for figure in ("p50", "p99"))
        rows.append((part, *map(_number, cells)))
    words = (
        "In ms, by the gateway's and the engine's own clocks. client_link: the client's TTFT from sending less the "
        "gateway's. streaming and engine_decode come after the first token; the rest makes up TTFT."
    )
    return _section("The server's stages", _grid(heads, rows), words)


def _charts(run: dict[str, Any]) -> str:
    drawn = {name: svg for name, chart in charts_of(run).items() if (svg := draw(chart))}
    if not drawn:
        return "<section><h2>Charts</h2><p>nothing was measured.</p></section>"
    narrow = "".join(_figure(name, svg) for name, svg in drawn.items() if name not in WIDE)
    wide = "".join(_figure(name, svg) for name, svg in drawn.items() if name in WIDE)
    both = f'<div class="charts">{narrow}</div><div class="over-time">{wide}</div>'
    return f'<section class="drawn"><h2>Charts</h2>{both}</section>'


def _figure(name: str, svg: str) -> str:
    return f'<figure id="{name}">{svg}</figure>'


def _explained(run: Mapping[str, Any]) -> str:
    lines = []
    for entry in run["explained"]:
        style = "bad" if entry["what"] == "error" else "watch"
        example = f'<br><span class="said">{escape(entry["example"])}</span>' if entry["example"] else ""
        text = escape(f"{entry['count']} × {entry['kind']}: {entry['meaning']}")
        lines.append(f'<li class="{style}">{text}{example}</li>')
    return f'<section><h2>What went wrong</h2><ul class="verdict">{"".join(lines)}</ul></section>' if lines else ""


def _footer(run: Mapping[str, Any]) -> str:
    load = run["settings"].get("load_test", {}) if run["kind"] == "run" else {}
    work = run["settings"].get("workload", {})
    given = ", ".join(f"{name} {value}" for name, value in {**load, **work}.items() if value is not None)
    made = ", ".join(f"{name} {value}" for name, value in run.get("versions", {}).items())
    machine = ", ".join(f"{name} {value}" for name, value in run.get("machine", {}).items())
    rows = (("settings", given), ("client", made), ("client's machine", machine), ("key", str(run["key_fingerprint"])))
    lines = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows if text)
    words = (
        "TTFT: due to the first event with a token. TPOT: (last token - first token) / (output tokens - 1). "
        "E2E: due to the end. Means are for reference; nothing is judged by them."
    )
    return f"<footer><dl>{lines}</dl><p>{words}</p></footer>"


def _section(title: str, body: str, words: str) -> str:
    below = f'<p class="words">{escape(words)}</p>' if words else ""
    return f"<section><h2>{title}</h2>{body}{below}</section>"


def _grid(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
