"""`tokenline bench compare A --live 1h`: a kept run against what the gateway serves now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cli.errors import CliError, Exit

if TYPE_CHECKING:
    from loadtest.live_verdict import LiveComparison

STYLES = {"changed": "bold red", "unchanged": "green", "unknown": "yellow"}


def compare_with_live(run: dict[str, Any], window: str, ops_url: str | None, *, as_json: bool) -> None:
    """Prints how live traffic of the run's model and prompt sizes differs from the run, layer by layer."""
    import random

    from cli.durations import window_of
    from cli.ops import ops_client
    from cli.output import print_json
    from loadtest.live_verdict import compare_live

    client = ops_client(ops_url, None)
    asked = {"window": window_of("--live", window), "model": run["model"]}
    flagged = []
    if "server_upstream" not in run["requests"]:
        flagged.append("the run was kept without the gateway's stages; repeat it through this gateway (--ops-url)")
    found = client.request("GET", "/live", params=asked)
    if found["requests"] > len(found["samples"]):
        flagged.append(f"{len(found['samples'])} of {found['requests']} live requests are compared, evenly spread")
    # A seed of its own: the same run and the same traffic always give the same answer.
    comparison = compare_live(run, found["samples"], random.Random(1))  # noqa: S311
    counts = {name: found[name] for name in ("window", "requests", "load_tests_left_out", "outcomes")}
    if as_json:
        print_json({"a": run["run"], "model": run["model"], "live": counts, "flagged": flagged, **comparison.view()})
    else:
        _show(run, counts, comparison, flagged)


def check_arguments(b: str | None, live: str | None, fail_on: list[str] | None) -> None:
    """Raises CliError where it is not either B or --live."""
    if (b is None) == (live is None):
        raise CliError("compare wants either a second run or --live TIME, such as --live 1h", Exit.USAGE)
    if live is not None and fail_on:
        raise CliError("--fail-on judges a second run; it does not go with --live", Exit.USAGE)


def _show(run: dict[str, Any], counts: dict[str, Any], comparison: LiveComparison, flagged: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from cli.bench_show import interval_of, ms
    from cli.output import console, echo, say_notes
    from loadtest.live_layers import is_changed
    from loadtest.live_verdict import LATENCIES

    out = console()
    left_out = f" ({counts['load_tests_left_out']} of load tests left out)" if counts["load_tests_left_out"] else ""
    out.print(
        f"A {run['run']}: {len(comparison.a)} requests of {run['model']}. "
        f"Live, the last {counts['window']}: {counts['requests']} requests{left_out}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("prompts", "ms", "A", "live", "change", "99 % interval", ""):
        table.add_column(name, justify="left" if name in ("prompts", "ms", "") else "right", no_wrap=True)
    before = ""
    for size in comparison.sizes:
        for found in (one for name in LATENCIES if (one := size.difference(name)) is not None):
            share = "-" if found.share is None else f"{found.share:+.1%}"
            interval = interval_of(found.low, found.high)
            changed = is_changed(found)
            verdict = Text("changed" if changed else "no change", "bold red" if changed else "dim")
            shown = "" if size.size == before else size.size
            table.add_row(shown, found.metric, ms(found.a), ms(found.b), share, interval, verdict)
            before = size.size
    if comparison.sizes:
        out.print(table)
    for name, layer in comparison.layers.items():
        out.print(Text(f"{name:8} {layer.state}", STYLES[layer.state]))
        for line in layer.evidence:
            out.print(f"         {line}")
    out.print()
    echo(comparison.text)
    say_notes(flagged)
