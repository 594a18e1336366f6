"""Lines of a width in terminal cells, for text of any script: Chinese breaks between characters, words stay whole."""

from __future__ import annotations

import re

from rich.cells import cell_len, chop_cells

_WIDE = r"\u2e80-\u9fff\uff00-\uffef"
_PIECE = re.compile(rf"`[^`]*`|\d[\d.]* (?:ms|s|%)(?![a-z])|[^\s{_WIDE}]+|[{_WIDE}]|\s+")
"""Code in backquotes, a number with its unit, a word of a spaced script, one wide character, or space."""
_CLOSING = frozenset("，。；：、！？）》」』")
"""Never the first character of a line: it stays with what it ends."""
_OPENING = frozenset("（「『《")
"""Not the last of a line: it stays with what it begins, where both fit in one."""


def wrapped(text: str, cells: int) -> list[str]:
    """The text in lines of at most `cells`; a word that is longer than a line is cut."""
    lines, line = [], ""
    for unit in _units(text, cells):
        if line and cell_len(line) + cell_len(unit.rstrip()) > cells:
            lines.append(line.rstrip())
            line = ""
        line += unit.lstrip() if not line else unit
    return [*lines, line.rstrip()] if line.strip() else lines


def padded(text: str, cells: int) -> str:
    """The text on the right of so many cells."""
    return " " * max(0, cells - cell_len(text)) + text


def _units(text: str, cells: int) -> list[str]:
    """What may not be broken: pieces with the closing marks that follow them."""
    units: list[str] = []
    for piece in _PIECE.findall(text):
        begins = units and units[-1][-1] in _OPENING and cell_len(units[-1] + piece) <= cells
        if begins or (units and piece[0] in _CLOSING):
            units[-1] += piece
        elif cell_len(piece) > cells:
            units += chop_cells(piece, cells)
        else:
            units.append(piece)
    return units
