"""What `bench run` and `bench sample` print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from cli.output import console, say, say_notes

KEPT_APART = ("requests", "samples", "timeline")
"""In the archive's file, not in the answer: one entry for each request or moment."""


def as_answer(run: dict[str, Any], file: Path) -> dict[str, Any]:
    """The run for programs, and where all of it is."""
    return {**{name: value for name, value in run.items() if name not in KEPT_APART}, "file": str(file)}


def show_run(run: dict[str, Any], file: Path) -> None:
    """A table of the stages, what went wrong, what to know."""
    out = console()
    out.print(
        f"{run['base_url']}, model {run['model']}; prompts {run['prompt_lengths']}; tokens by {run['token_counts']}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("stage", no_wrap=True)
    for name in ("TPS", "req/s", "TTFT", "TPOT", "gap", "E2E", "errors", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in run["stages"]:
        table.add_row(*_row(stage))
    out.print(table)
    out.print("times: P50 / P95 / P99 in ms")
    for number, stage in enumerate(run["stages"], 1):
        for line in _beside(stage):
            out.print(f"stage {number}: {line}")
    show_explained(run)
    say_notes(run["notes"])
    if run["stopped"]:
        say(f"ended before its time: {run['stopped']}")
    say(f"run {run['run']} is kept in {file}")


def show_explained(run: dict[str, Any]) -> None:
    """Every kind of failure and oddity."""
    for entry in run["explained"]:
        example = f" ({entry['example']})" if entry["example"] else ""
        style = "bold red" if entry["what"] == "error" else "yellow"
        console().print(Text(f"{entry['count']} x {entry['kind']}: {entry['meaning']}{example}", style))


def _row(stage: dict[str, Any]) -> tuple[str, ...]:
    busy = (stage["engine"] or {}).get("busy")
    load = f"{stage['rate']:g}/s" if stage["rate"] else str(stage["concurrency"])
    return (
        f"{load}, {stage['counted_seconds']:.0f} s",
        "-" if stage["tps"] is None else f"{stage['tps']:.1f}",
        f"{stage['rps']:.2f}",
        *(several(stage[name]) for name in ("ttft_ms", "tpot_ms", "gap_ms", "e2e_ms")),
        str(stage["errors"]),
        "-" if busy is None else f"{busy:.0%}",
    )


def _beside(stage: dict[str, Any]) -> list[str]:
    lines = []
    if stage["rate"]:
        late, sent = stage["client"]["sent_late_ms"], stage["ttft_from_sent_ms"]
        lines.append(
            f"times are from the schedule; sent {ms(late['p50'])} ms late at P50, {ms(late['p99'])} at P99; "
            f"TTFT from sending: P50 {ms(sent['p50'])}, P99 {ms(sent['p99'])} ms"
        )
    if stage["retries"]:
        lines.append(f"{stage['retries']} retries of {stage['retried_requests']} requests are in these times")
    if goodput := stage["goodput"]:
        share = "" if goodput["share"] is None else f" ({goodput['share']:.1%} of those due)"
        wanted = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo_ms"].items())
        lines.append(f"goodput {goodput['rps']:g} requests/s{share} within {wanted}")
    return lines


def several(spread: dict[str, Any]) -> str:
    """P50, P95 and P99 in one cell."""
    if not spread["count"]:
        return "-"
    return "/".join(ms(spread[name]) for name in ("p50", "p95", "p99"))


def ms(value: float | None) -> str:
    """Milliseconds in a table's cell."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
