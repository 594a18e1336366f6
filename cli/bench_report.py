"""`tokenline bench report`: a kept run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.errors import EXIT_CODES, CliError, Exit
from cli.options import Json

EPILOG = f"""
The page needs no network and no script: percentiles by stage, latency against load, distributions, TTFT against the
length of the prompt, throughput over time beside what the engine was doing.

Examples:

\b
  tokenline bench report last
  tokenline bench report 20260102-0304 --output before.html

{EXIT_CODES}
"""


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, `last`, or its file.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to. [default: RUN.html in this folder]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Writes a kept run or sampling as one HTML page."""
    from cli.bench_options import read_kept
    from cli.output import print_json
    from loadtest.report import report as page_of

    kept = read_kept(run)
    file = output or Path(f"{kept['run']}.html")
    try:
        file.write_text(page_of(kept), encoding="utf-8")
    except OSError as error:
        raise CliError(
            f"{file} can't be written: {error.strerror}; --output names another place", Exit.FAILURE
        ) from None
    if as_json:
        print_json({"run": kept["run"], "file": str(file)})
    else:
        typer.echo(str(file))
