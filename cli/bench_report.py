"""`tokenline bench report`: a kept run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.errors import EXIT_CODES, CliError, Exit
from cli.options import Json

EPILOG = f"""
The page needs no network and no script: what the run says, percentiles by stage, latency against load, where the time
goes, distributions, TTFT against the length of the prompt, throughput over time beside what the engine was doing. Each
chart is also written as a picture beside it: PAGE-CHART.png.

Examples:

\b
  tokenline bench report last
  tokenline bench report 20260102-0304 --output before.html
  tokenline bench report last --no-png

{EXIT_CODES}
"""


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, `last`, or its file.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to. [default: RUN.html in this folder]")
    ] = None,
    png: Annotated[bool, typer.Option("--png/--no-png", help="Charts as pictures too, beside the page.")] = True,
    as_json: Json = False,
) -> None:
    """Writes a kept run or sampling as one HTML page, and its charts as pictures."""
    from cli.bench_options import read_kept
    from cli.output import print_json, say_notes
    from loadtest.picture import NoPictures, save_pictures
    from loadtest.report import report as page_of

    kept = read_kept(run)
    file = output or Path(f"{kept['run']}.html")
    notes = []
    pictures: list[Path] = []
    try:
        file.write_text(page_of(kept), encoding="utf-8")
        if png:
            pictures = save_pictures(kept, file.parent, file.stem)
    except NoPictures as error:
        notes.append(f"no pictures: {error}")
    except OSError as error:
        raise CliError(
            f"{error.filename or file} can't be written: {error.strerror}; --output names another place", Exit.FAILURE
        ) from None
    if as_json:
        print_json({"run": kept["run"], "file": str(file), "pictures": [str(one) for one in pictures], "notes": notes})
        return
    for one in (file, *pictures):
        typer.echo(str(one))
    say_notes(notes)
