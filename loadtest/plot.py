"""Charts as SVG text: lines, dots and stacked bars over plain axes, with ticks, names and a key. No script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 640, 330
WIDE_WIDTH, WIDE_HEIGHT = 1120, 270
LEFT, RIGHT, BOTTOM = 58, 18, 46
MOST_POINTS = 1500
"""Of one series: more can't be told apart at this size."""
MARKED_POINTS = 12
"""A line of at most so many points shows each of them."""
COLOURS = 8
"""Classes s0 to s7; the page's style says what they look like."""
CHARACTER = 6.6
"""Width of one in the key, about."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line, area or cloud of dots. `colour` is one of COLOURS; `is_dashed` tells it apart without colour too."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    kind: Literal["line", "area", "dots"] = "line"
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn, before it is drawn."""

    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    note: str = ""
    """Below the title: what to read out of it."""
    bands: Sequence[Point] = ()
    """Stretches of the x axis that stand out: what counts of a run."""
    y_most: float | None = None
    x_range: tuple[float, float] | None = None
    places: Sequence[float] = ()
    """Ticks of the x axis; empty: round numbers."""
    is_wide: bool = False


@dataclass(frozen=True)
class Bars:
    """Stacked bars side by side; every part is (name, one value for each bar, colour)."""

    title: str
    y_name: str
    names: Sequence[str]
    parts: Sequence[tuple[str, Sequence[float], int]]
    note: str = ""


def draw(chart: Chart | Bars) -> str:
    """The SVG, or an empty string where there is nothing to draw."""
    return _draw_bars(chart) if isinstance(chart, Bars) else _draw_chart(chart)


@dataclass(frozen=True)
class _Frame:
    """Where things lie: title, note and key above the axes, from the top down."""

    width: int
    height: int
    note: str
    key: Sequence[tuple[str, int, bool]]
    """Name, colour and whether it is dots; a single entry needs no key."""

    @property
    def top(self) -> int:
        return 52 + 19 * bool(self.note) + 22 * self.has_key

    @property
    def has_key(self) -> bool:
        return len(self.key) > 1

    @property
    def floor(self) -> int:
        return self.height - BOTTOM

    @property
    def across(self) -> tuple[float, float]:
        return LEFT, self.width - RIGHT

    @property
    def up(self) -> tuple[float, float]:
        return self.floor, self.top

    def opening(self, title: str) -> str:
        """The SVG's beginning, with title, note and key."""
        note = f'<text class="note" x="0" y="35">{escape(self.note)}</text>' if self.note else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(title, quote=True)}"><text class="title" x="0" y="16">{escape(title)}</text>'
            f"{note}{self._drawn_key() if self.has_key else ''}"
        )

    def y_axis(self, name: str, bounds: Point) -> str:
        """Lines across at round numbers, and what they are."""
        parts = [f'<text class="tick" x="0" y="{self.top - 12}">{escape(name)}</text>']
        for value in _ticks(*bounds):
            y = _place(value, bounds, *self.up)
            style = "axis" if value == bounds[0] else "grid"
            parts.append(f'<line class="{style}" x1="{LEFT}" x2="{self.across[1]}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{y + 4:.1f}">{_written(value)}</text>'
            )
        return "".join(parts)

    def x_tick(self, x: float, text: str) -> str:
        return f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{self.floor + 18}">{escape(text)}</text>'

    def x_name(self, name: str) -> str:
        return f'<text class="tick" text-anchor="end" x="{self.across[1]}" y="{self.floor + 37}">{escape(name)}</text>'

    def _drawn_key(self) -> str:
        parts, at, y = [], 0.0, 34 + 19 * bool(self.note)
        for name, colour, is_round in self.key:
            parts.append(
                f'<circle class="s{colour} dot" cx="{at + 5:.0f}" cy="{y}" r="4.5"/>'
                if is_round
                else f'<rect class="s{colour} bar" x="{at:.0f}" y="{y - 5}" width="10" height="10" rx="2"/>'
            )
            parts.append(f'<text class="key" x="{at + 15:.0f}" y="{y + 4}">{escape(name)}</text>')
            at += 32 + CHARACTER * len(name)
        return "".join(parts)


def _draw_chart(chart: Chart) -> str:
    shown = [one for one in chart.series if one.points]
    if not shown:
        return ""
    x_bounds = chart.x_range or _bounds([x for one in shown for x, _ in one.points], from_zero=False)
    y_bounds = (0.0, chart.y_most) if chart.y_most else _bounds([y for one in shown for _, y in one.points])
    width, height = (WIDE_WIDTH, WIDE_HEIGHT) if chart.is_wide else (WIDTH, HEIGHT)
    frame = _Frame(width, height, chart.note, [(one.name, one.colour, one.kind == "dots") for one in shown])
    parts = [frame.opening(chart.title)]
    for begin, end in chart.bands:
        left, right = (_place(min(max(x, x_bounds[0]), x_bounds[1]), x_bounds, *frame.across) for x in (begin, end))
        tall = frame.floor - frame.top
        parts.append(f'<rect class="band" x="{left:.1f}" y="{frame.top}" width="{right - left:.1f}" height="{tall}"/>')
    parts.append(frame.y_axis(chart.y_name, y_bounds))
    ticks = chart.places or _ticks(*x_bounds)
    parts += [frame.x_tick(_place(value, x_bounds, *frame.across), _written(value)) for value in ticks]
    parts.append(frame.x_name(chart.x_name))
    for one in shown:
        placed = [(_place(x, x_bounds, *frame.across), _place(y, y_bounds, *frame.up)) for x, y in _thinned(one.points)]
        parts.append(_drawn(one, placed, frame.floor))
    return "".join([*parts, "</svg>"])


def _draw_bars(bars: Bars) -> str:
    shown = [part for part in bars.parts if any(value > 0 for value in part[1])]
    if not shown or not bars.names:
        return ""
    bounds = _bounds([sum(values[at] for _, values, _ in shown) for at in range(len(bars.names))])
    frame = _Frame(WIDTH, HEIGHT, bars.note, [(part, colour, False) for part, _, colour in shown])
    parts = [frame.opening(bars.title), frame.y_axis(bars.y_name, bounds)]
    room = (frame.across[1] - frame.across[0]) / len(bars.names)
    width = min(72.0, room * 0.6)
    for at, name in enumerate(bars.names):
        middle = frame.across[0] + room * (at + 0.5)
        base = 0.0
        for part, values, colour in shown:
            low, high = _place(base, bounds, *frame.up), _place(base + values[at], bounds, *frame.up)
            base += values[at]
            parts.append(
                f'<rect class="s{colour} bar" x="{middle - width / 2:.1f}" y="{high:.1f}" width="{width:.1f}" '
                f'height="{max(0.0, low - high):.1f}"><title>{escape(part)}: {values[at]:.4g}</title></rect>'
            )
        parts.append(frame.x_tick(middle, name))
    return "".join([*parts, "</svg>"])


def _drawn(series: Series, placed: Sequence[Point], floor: float) -> str:
    style = f"s{series.colour}"
    if series.kind == "dots":
        return "".join(f'<circle class="{style} dot" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in placed)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dash = ' stroke-dasharray="6 4"' if series.is_dashed else ""
    drawn = f'<polyline class="{style} line" points="{path}"{dash}/>'
    if series.kind == "area":
        under = f"{placed[0][0]:.1f},{floor} {path} {placed[-1][0]:.1f},{floor}"
        drawn = f'<polygon class="{style} area" points="{under}"/>{drawn}'
    if len(placed) <= MARKED_POINTS:
        told = zip(placed, series.points, strict=True)
        drawn += "".join(
            f'<circle class="{style} bar" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(series.name)} at '
            f"{_written(at)}: {value:.4g}</title></circle>"
            for (x, y), (at, value) in told
        )
    return drawn


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MOST_POINTS:
        return points
    step = len(points) / MOST_POINTS
    return [*(points[int(n * step)] for n in range(MOST_POINTS)), points[-1]]


def _bounds(values: Sequence[float], *, from_zero: bool = True) -> tuple[float, float]:
    """Where an axis begins and ends; one that begins at zero ends at a round number."""
    low, high = min(values), max(values)
    if not from_zero:
        return (low, high) if high > low else (low - 1, low + 1)
    low, high = min(0.0, low), max(0.0, high)
    if high == low:
        return low, low + 1
    step = _step(low, high)
    return math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step


def _place(value: float, bounds: tuple[float, float], at_low: float, at_high: float) -> float:
    return at_low + (value - bounds[0]) / (bounds[1] - bounds[0]) * (at_high - at_low)


def _step(low: float, high: float) -> float:
    rough = (high - low) / 5
    power: float = 10 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough - 1e-12)


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers in the range."""
    step = _step(low, high)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _written(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
