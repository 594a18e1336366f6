"""What `bench run` and `bench sample` print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from cli.output import console, say, say_notes
from loadtest.digits import four_digits

SMALLEST_SHOWN_MS = 0.1
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
    for number, stage in enumerate(run["stages"], 1):
        out.print(f"stage {number}: {_headline(stage)}")
        for line in beside(stage):
            out.print(f"  {line}")
    show_figures([(f"stage {number}", stage) for number, stage in enumerate(run["stages"], 1)])
    show_server_stages([(str(number), stage) for number, stage in enumerate(run["stages"], 1)])
    show_explained(run)
    say_notes(run["notes"])
    if run["stopped"]:
        say(f"ended before its time: {run['stopped']}")
    say(f"run {run['run']} is kept in {file}")


def show_server_stages(named: list[tuple[str, dict[str, Any]]]) -> None:
    """Where the time went by the server's own account, a column for each stage of load."""
    told = [(name, stage["server_stages_ms"]) for name, stage in named if stage["server_stages_ms"]]
    if not told:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("the server's stages, ms", no_wrap=True)
    for name, _ in told:
        table.add_column(f"{name} P50" if len(told) > 1 else "P50", justify="right", no_wrap=True)
        table.add_column("P99", justify="right", no_wrap=True, min_width=4)
    for server_stage in dict.fromkeys(one for _, stages in told for one in stages):
        cells = [stages.get(server_stage, {}).get(figure) for _, stages in told for figure in ("p50", "p99")]
        if any(value is not None and value >= SMALLEST_SHOWN_MS for value in cells):
            table.add_row(server_stage, *(ms(value) for value in cells))
    console().print(table)
    console().print(f"stages of less than {SMALLEST_SHOWN_MS:g} ms are left out", style="dim")


def show_explained(run: dict[str, Any]) -> None:
    """Every kind of failure and oddity."""
    for entry in run["explained"]:
        example = f" ({entry['example']})" if entry["example"] else ""
        style = "bold red" if entry["what"] == "error" else "yellow"
        console().print(Text(f"{entry['count']} x {entry['kind']}: {entry['meaning']}{example}", style))


def show_figures(named: list[tuple[str, dict[str, Any]]]) -> None:
    """Percentiles of every stage's or group's times, in ms."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "ms", "P50", "P90", "P95", "P99", "max", "mean*", "of"):
        table.add_column(name, justify="left" if name in ("", "ms") else "right", no_wrap=True)
    for name, stage in named:
        shown = name
        for label, metric in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("gap", "gap_ms"), ("E2E", "e2e_ms")):
            spread = stage[metric]
            cells = (ms(spread[figure]) for figure in ("p50", "p90", "p95", "p99", "max", "mean"))
            table.add_row(shown, label, *cells, str(spread["count"]))
            shown = ""
    console().print(table)
    console().print("* the mean is for reference only", style="dim")


def _headline(stage: dict[str, Any]) -> str:
    load = f"{stage['rate']:g} requests/s" if stage["rate"] else f"{stage['concurrency']} in flight"
    tps = "" if stage["tps"] is None else f"{stage['tps']:.1f} tokens/s, "
    figures = f"{tps}{stage['rps']:.2f} requests/s, {stage['errors']} of {stage['requests']} failed"
    engine = stage["engine"] or {}
    busy = "".join(
        f", {label} {engine[name]:.0%}"
        for label, name in (("device busy", "busy"), ("GPU", "gpu_utilization"), ("KV", "kv_usage"))
        if name in engine
    )
    cpu = stage["client"]["cpu_share"]
    own = "" if cpu is None else f", client CPU {cpu:.0%}"
    return f"{load}, {stage['counted_seconds']:.3g} s counted: {figures}{busy}{own}"


def beside(stage: dict[str, Any]) -> list[str]:
    lines = []
    if stage["rate"]:
        late, sent = stage["client"]["sent_late_ms"], stage["ttft_from_sent_ms"]
        lines.append(
            f"times are from the schedule, with at most {stage['concurrency']} in flight; "
            f"sent {ms(late['p50'])} ms late at P50, {ms(late['p99'])} at P99; "
            f"TTFT from sending: P50 {ms(sent['p50'])}, P99 {ms(sent['p99'])} ms"
        )
    if stage["retries"]:
        lines.append(f"{stage['retries']} retries of {stage['retried_requests']} requests are in these times")
    if tail := stage["tail"]:
        lines.append(f"P99 TTFT is {tail['p99_over_p50']:.1f} times P50: {tail['verdict']}")
    if goodput := stage["goodput"]:
        share = "" if goodput["share"] is None else f" ({goodput['share']:.1%} of those due)"
        wanted = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo_ms"].items())
        lines.append(f"goodput {goodput['rps']:.2f} requests/s{share} within {wanted}")
    return lines


def ms(value: float | None) -> str:
    """Milliseconds in a table's cell."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def interval_of(low: float | None, high: float | None) -> str:
    """The bounds of a difference in a table's cell."""
    return "-" if low is None or high is None else f"{four_digits(low, '+')} to {four_digits(high, '+')}"
