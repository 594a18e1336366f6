"""Stages as a waterfall: each bar begins where the stage before it ended."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from cli.wrap import padded
from tracing.stages import ENGINE_STAGES, GATEWAY_STAGES, STAGES

NAME_CELLS, MS_CELLS, SHARE_CELLS, USUAL_CELLS = 16, 11, 8, 11
MIN_BAR_CELLS = 8
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def in_time_order(stages: Mapping[str, float]) -> list[tuple[str, float]]:
    """Stages as time runs; names that this version doesn't know come last."""
    order = {name: number for number, name in enumerate(STAGES)}
    return sorted(stages.items(), key=lambda stage: order.get(stage[0], len(order)))


def waterfall(
    stages: list[tuple[str, float]],
    total_ms: float,
    *,
    cells: int,
    blocks: bool = True,
    usual_ms: Mapping[str, float] | None = None,
) -> list[Text]:
    """One line a stage: name, bar, ms, share of the total, and what is usual where that is known.

    `cells`: width of a line; `blocks`: Unicode can be shown.
    """
    columns = MS_CELLS + SHARE_CELLS + (0 if usual_ms is None else USUAL_CELLS)
    bar_cells = max(MIN_BAR_CELLS, cells - 2 - NAME_CELLS - columns)
    lines = []
    reached_ms = 0.0
    for name, ms in stages:
        line = Text("  " + name.ljust(NAME_CELLS))
        line.append(bar(reached_ms, ms, total_ms, bar_cells, blocks=blocks).ljust(bar_cells), style=_style_of(name))
        line.append(amount(ms, total_ms))
        if usual_ms is not None:
            usual = f"{usual_ms[name]:.2f}" if name in usual_ms else "-"
            line.append(usual.rjust(USUAL_CELLS), style="dim")
        lines.append(line)
        reached_ms += ms
    return lines


def heading(words: tuple[str, str, str], *, cells: int) -> Text:
    """The line above a waterfall with usual values: what its three columns of numbers are."""
    took, share, usual = words
    line = padded(took, MS_CELLS) + padded(share, SHARE_CELLS) + padded(usual, USUAL_CELLS)
    return Text(padded(line, cells), style="dim")


def amount(ms: float, total_ms: float) -> str:
    """ms and share, in columns."""
    share = f"{ms / total_ms * 100:.1f} %" if total_ms > 0 else ""
    return f"{ms:.2f}".rjust(MS_CELLS) + share.rjust(SHARE_CELLS)


def bar(start_ms: float, ms: float, total_ms: float, cells: int, *, blocks: bool = True) -> str:
    """The bar of [start, start + ms) on a line of `cells` that stands for the total; nothing for no time.

    Its length is true to an eighth of a cell, its start to a cell.
    """
    if ms <= 0 or total_ms <= 0:
        return ""
    start = min(max(0, int(start_ms / total_ms * cells)), cells - 1)
    full, rest = divmod(min(round(ms / total_ms * cells * 8), (cells - start) * 8), 8)
    if not blocks:
        return " " * start + "#" * max(1, full + (rest >= 4))
    return " " * start + ("█" * full + _EIGHTHS[rest] or _EIGHTHS[1])


def _style_of(name: str) -> str:
    if name in GATEWAY_STAGES:
        return "cyan"
    if name in ENGINE_STAGES and not name.startswith("transit"):
        return "magenta"
    return "red" if name == "unaccounted" else "yellow"
