"""Tables of text for people."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WHOLE_CELLS = 1000
"""No table is as wide."""
LONGEST_WORD_CELLS = 14
"""Words of up to so many cells stay in one piece."""


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table without lines; its first column never breaks."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [tuple(row) for row in rows]
    for number, column in enumerate(columns):
        longest = max((len(word) for row in shown for word in row[number].split()), default=0)
        table.add_column(
            column, overflow="fold", no_wrap=number == 0, min_width=min(max(longest, len(column)), LONGEST_WORD_CELLS)
        )
    for row in shown:
        table.add_row(*row)
    print_whole(table)


def print_whole(table: Table) -> None:
    """As wide as the terminal; to a file or a pipe as wide as its rows are, so that each stays one line for grep."""
    from cli.output import console

    out = console()
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = WHOLE_CELLS
    out.print(table)
