"""`tokenline bench`: load tests of an endpoint, and measurements of the engine on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli import bench_compare, bench_report, bench_run, bench_sample
from cli.errors import EXIT_CODES
from cli.options import Json

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Load tests of an endpoint; measurements of the engine on this machine.",
    rich_markup_mode=None,
)

EPILOG = f"""
Examples:

\b
  tokenline bench gap                  a full batch of 256, a forward of 35 ms
  tokenline bench gap --json | jq '.rows[] | {{mode, gap_p95_ms, busy_ratio}}'

{EXIT_CODES}
"""


@app.command(epilog=EPILOG, short_help="Measures the time between two forwards.")
def gap(
    batch: Annotated[int, typer.Option("--batch", min=1, max=4096, help="Sequences in a step.")] = 256,
    forward_ms: Annotated[float, typer.Option("--forward-ms", min=0.0, help="Length of a forward.")] = 35.0,
    steps: Annotated[int, typer.Option("--steps", min=10, max=100_000, help="Steps measured in each mode.")] = 120,
    as_json: Json = False,
) -> None:
    """The time between two forwards: synchronous, then with text processes, static slots and asynchronous scheduling.

    The engine core runs over the simulated device, without HTTP; each mode in a process of its own.
    """
    from cli.errors import CliError
    from cli.extras import check_engine_installed
    from cli.output import print_json
    from loadtest.gap import GapFailed
    from settings.schema import Settings

    check_engine_installed(Settings.model_validate({"state_dir": "/nonexistent"}))
    try:
        rows = _measure(batch, forward_ms, steps)
    except GapFailed as error:
        raise CliError(str(error)) from error
    if as_json:
        print_json({"batch": batch, "forward_ms": forward_ms, "simulated": True, "rows": rows})
    else:
        _show(rows, batch, forward_ms)


def _measure(batch: int, forward_ms: float, steps: int) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from loadtest.gap import MODES, gap_table

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(MODES[0], total=len(MODES))

        def tell(mode: str, share: float) -> None:
            bar.update(task, description=mode, completed=MODES.index(mode) + share)

        return gap_table(batch=batch, forward_ms=forward_ms, steps=steps, progress=tell)


def _show(rows: list[dict[str, Any]], batch: int, forward_ms: float) -> None:
    from rich.table import Table

    from cli.output import console

    out = console()
    out.print(f"Simulated device: batch {batch}, forward {forward_ms:g} ms. Times in ms.")
    out.print("The slot kernels' time is the device's. Below it, the host's time by part,")
    out.print("and beside it text that another process makes.")
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("mode", "gap P50", "gap P95", "busy", "tokens/s", "TPOT P50", "TPOT P99", "kernels"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*cells_of(row))
    out.print(table)
    parts = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    parts.add_column("host, per step", no_wrap=True)
    names = list(rows[0]["host_ms"])
    for name in (*names, "sum", "beside"):
        parts.add_column(name.replace("_and_", ", "), justify="right", no_wrap=True)
    for row in rows:
        host = row["host_ms"]
        values = (*(host[name] for name in names), sum(host.values()), row["text_process_ms"])
        parts.add_row(row["mode"], *(f"{value:.2f}" for value in values))
    out.print()
    out.print(parts)


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    return (
        row["mode"],
        f"{row['gap_p50_ms']:.2f}",
        f"{row['gap_p95_ms']:.2f}",
        f"{row['busy_ratio']:.1%}",
        f"{row['tps']:.0f}",
        f"{row['tpot_p50_ms']:.2f}",
        f"{row['tpot_p99_ms']:.2f}",
        f"{row['slot_kernel_ms']:.2f}",
    )


app.command(epilog=bench_run.EPILOG, short_help="Puts an endpoint under load.")(bench_run.run)
app.command(epilog=bench_sample.EPILOG, short_help="Asks one request after another.")(bench_sample.sample)
app.command(epilog=bench_compare.EPILOG, short_help="Tells what differs between two runs.")(bench_compare.compare)
app.command(epilog=bench_report.EPILOG, short_help="Writes a run as one HTML page.")(bench_report.report)
