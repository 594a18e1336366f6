"""`tokenline bench compare`: two kept runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.errors import EXIT_CODES, CliError, Exit
from cli.options import Json, OpsUrl

if TYPE_CHECKING:
    from loadtest.compare import Difference
    from loadtest.fail_on import Rule

EPILOG = f"""
A run is named by its id, the beginning of one, `last`, or its file. B is judged against A: intervals hold the
difference B - A with 99 % confidence (bootstrap); a difference whose interval holds 0 is
not sure, one of less than 2 % is none.
Runs of another base_url, key or model are not compared unless --anyway says so.

--live compares with the gateway's traffic of the same model and prompt sizes, without load tests. Model, traffic, link,
engine and gateway are each told to be changed, unchanged or unknown, with what was measured. `traffic` changed when
lengths or company did; `engine` when requests of like length in like company took longer.

--fail-on ends with exit code 1 when a difference is beyond its limit and its interval does not hold 0.

Examples:

\b
  tokenline bench compare 20260102-0304 last
  tokenline bench compare before.json after.json --fail-on 'ttft_p99>+10%' --fail-on 'tps<-5%'
  tokenline bench compare 20260102-0304 --live 1h
  tokenline bench compare before.json last --json | jq '.differences[] | select(.verdict == "worse")'

{EXIT_CODES}
"""


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The run before.", show_default=False)],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="The run after; not with --live.", show_default=False)
    ] = None,
    live: Annotated[
        str | None,
        typer.Option("--live", metavar="TIME", help="Instead of B: what the gateway served in this time, such as 1h."),
    ] = None,
    fail_on: Annotated[
        list[str] | None, typer.Option("--fail-on", metavar="LIMIT", help="Such as 'ttft_p99>+10%'; may be repeated.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare though base_url, key or model are not the same.")
    ] = False,
    ops_url: OpsUrl = None,
    as_json: Json = False,
) -> None:
    """Tells what differs between two runs, how sure that is, and which of the server's stages moved.

    With --live: whether model, traffic, link or engine changed since the run, by the gateway's account of both.
    """
    import random

    from cli.bench_live import check_arguments, compare_with_live
    from cli.bench_options import read_kept
    from cli.output import print_json
    from loadtest.compare import compare as compare_runs
    from loadtest.compare import foreign, moved, other_settings, pairs
    from loadtest.fail_on import broken, parse_rule

    rules = [parse_rule(text) for text in fail_on or []]
    check_arguments(b, live, fail_on)
    first = read_kept(a)
    if live is not None:
        compare_with_live(first, live, ops_url, as_json=as_json)
        return
    second = read_kept(b or "")
    different = foreign(first, second)
    if different and not anyway:
        raise CliError(f"not comparable: {'; '.join(different)}. --anyway compares them all the same", Exit.USAGE)
    if not pairs(first, second):
        raise CliError("the runs have no stage with the same load in common", Exit.USAGE)
    # A seed of its own: the same two files always give the same answer.
    differences = compare_runs(first, second, random.Random(1))  # noqa: S311
    failed = broken(rules, differences)
    flagged = [f"not the same thing: {text}" for text in different]
    if first["run"] == second["run"]:
        flagged.append("A and B are one and the same run")
    flagged += [f"not the same settings: {text}" for text in other_settings(first, second)]
    if ("server_upstream" in first["requests"]) != ("server_upstream" in second["requests"]):
        flagged.append("the gateway's stages are joined in one of the two runs only: its stages are not compared")
    if as_json:
        print_json(
            {
                "a": first["run"],
                "b": second["run"],
                "confidence": 0.99,
                "flagged": flagged,
                "differences": [_as_json(found) for found in differences],
                "moved": {stage: _as_json(found) for stage, found in moved(differences).items()},
                "broken": [{"rule": rule.text, **_as_json(found)} for rule, found in failed],
            }
        )
    else:
        _show(first, second, differences, flagged, failed)
    if failed:
        raise typer.Exit(int(Exit.FAILURE))


def _as_json(found: Difference) -> dict[str, Any]:
    return {
        "stage": found.stage, "metric": found.metric, "a": found.a, "b": found.b, "change": found.change,
        "share": found.share, "low": found.low, "high": found.high, "verdict": found.verdict,
    }  # fmt: skip


def _is_shown(found: Difference) -> bool:
    """Stages that did not move are no news; nor is the TTFT from sending where nobody was kept waiting to be sent."""
    if found.metric.startswith("ttft_from_sent") and not found.stage.endswith("requests/s"):
        return False
    return found.server_stage is None or not found.is_small


def _show(
    first: dict[str, Any],
    second: dict[str, Any],
    differences: list[Difference],
    flagged: list[str],
    failed: list[tuple[Rule, Difference]],
) -> None:
    from rich.table import Table
    from rich.text import Text

    from cli.bench_show import interval_of, ms
    from cli.output import console, say_notes
    from loadtest.compare import moved
    from loadtest.digits import four_digits

    out = console()
    out.print(f"A {first['run']}, B {second['run']}: {first['base_url']}, model {first['model']}")
    styles = {"not sure": "yellow", "worse": "bold red", "better": "green", "longer": "red", "shorter": "green"}
    for stage in dict.fromkeys(found.stage for found in differences):
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in (stage, "A", "B", "change", "99 % of B - A", ""):
            table.add_column(name, justify="left" if name in (stage, "") else "right", no_wrap=True)
        for found in (one for one in differences if one.stage == stage and _is_shown(one)):
            share = "-" if found.share is None else f"{found.share:+.1%}"
            interval = interval_of(found.low, found.high)
            verdict = Text(found.verdict, styles.get(found.verdict, "dim"))
            table.add_row(found.metric, ms(found.a), ms(found.b), share, interval, verdict)
        out.print(table)
    out.print("stages that differ by less than 2 % of the whole are left out; --json has them")
    if not any(found.is_sure for found in differences):
        out.print("no difference: none is both sure and large enough to matter")
    for stage, found in moved(differences).items():
        name = found.metric.removesuffix("_p50")
        out.print(f"{stage}: {name} moved most, by {four_digits(found.change, '+')} ms at P50")
    for rule, found in failed:
        out.print(
            Text(f"fails {rule.text}: {found.stage}, {four_digits(found.a)} to {four_digits(found.b)}", "bold red")
        )
    say_notes(flagged)
