"""Charts as SVG text: lines and dots over two axes, with ticks, names and a key. No script, no font to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 64, 34, 46
COLOURS = ("#2f6fd0", "#d0662f", "#2f9d5c", "#8a4fc0", "#b58a00", "#c03a5b")
MOST_POINTS = 2000
"""Of one series: more can't be told apart at this size."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line or cloud of dots; `on_right` reads on the second axis."""

    name: str
    points: Sequence[Point]
    kind: Literal["line", "dots"] = "line"
    on_right: bool = False


def chart(title: str, x_name: str, y_name: str, series: Sequence[Series], right_name: str = "") -> str:
    """The chart, or a line that says that there is nothing to draw."""
    shown = [one for one in series if one.points]
    if not shown:
        return f"<p><b>{escape(title)}</b>: nothing was measured.</p>"
    x_low, x_high = _bounds([x for one in shown for x, _ in one.points], from_zero=False)
    left = _bounds([y for one in shown if not one.on_right for _, y in one.points])
    right = _bounds([y for one in shown if one.on_right for _, y in one.points])
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
    ]
    for value in _ticks(*left):
        y = _place(value, left, HEIGHT - BOTTOM, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{_written(value)}</text>')
    if any(one.on_right for one in shown):
        for value in _ticks(*right):
            y = _place(value, right, HEIGHT - BOTTOM, TOP)
            parts.append(f'<text class="tick" x="{WIDTH - RIGHT + 6}" y="{y + 4:.1f}">{_written(value)}</text>')
        parts.append(f'<text class="tick" text-anchor="end" x="{WIDTH - 4}" y="{TOP - 8}">{escape(right_name)}</text>')
    for value in _ticks(x_low, x_high):
        x = _place(value, (x_low, x_high), LEFT, WIDTH - RIGHT)
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{_written(value)}</text>'
        )
    parts.append(f'<text class="tick" x="4" y="{TOP - 8}">{escape(y_name)}</text>')
    parts.append(
        f'<text class="tick" text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 30}">{escape(x_name)}</text>'
    )
    at = float(LEFT)
    for number, one in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        placed = [
            (
                _place(x, (x_low, x_high), LEFT, WIDTH - RIGHT),
                _place(y, right if one.on_right else left, HEIGHT - BOTTOM, TOP),
            )
            for x, y in _thinned(one.points)
        ]
        parts.append(_drawn(one, placed, colour))
        parts.append(f'<rect x="{at:.0f}" y="{HEIGHT - 14}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text class="tick" x="{at + 14:.0f}" y="{HEIGHT - 5}">{escape(one.name)}</text>')
        at += 30 + 6.6 * len(one.name)
    return "".join([*parts, "</svg>"])


def _drawn(series: Series, placed: Sequence[Point], colour: str) -> str:
    if series.kind == "dots":
        return "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}" fill-opacity="0.45"/>' for x, y in placed
        )
    dash = ' stroke-dasharray="5 3"' if series.on_right else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed if len(placed) <= 12
    )
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>{marks}'


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MOST_POINTS:
        return points
    step = len(points) / MOST_POINTS
    return [*(points[int(n * step)] for n in range(MOST_POINTS)), points[-1]]


def _bounds(values: Sequence[float], *, from_zero: bool = True) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = (min(0.0, min(values)) if from_zero else min(values)), max(values)
    if high > low:
        return low, high
    return (low, low + 1) if from_zero else (low - 1, low + 1)


def _place(value: float, bounds: tuple[float, float], at_low: float, at_high: float) -> float:
    return at_low + (value - bounds[0]) / (bounds[1] - bounds[0]) * (at_high - at_low)


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers in the range."""
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _written(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
