"""Tables of text for people."""

from __future__ import annotations

from collections.abc import Iterable


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table without lines; its first column never breaks."""
    from rich.table import Table

    from cli.output import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    console().print(table)
