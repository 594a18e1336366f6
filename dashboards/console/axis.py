"""An axis of milliseconds and the bars on it, in percent of its length."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

TICKS = 5


@dataclass(frozen=True)
class Bar:
    """One named amount and where it lies on its chart's axis."""

    name: str
    ms: float
    group: str
    """gateway, network, engine, or rest: the colour."""
    start_ms: float | None
    """Since ingress; None where only the length is known."""
    segments: tuple[tuple[float, float], ...] = ()
    """(start, length) in percent of the axis."""
    share: float | None = None
    """Of the chart's total."""
    is_negative: bool = False


@dataclass(frozen=True)
class Chart:
    """Bars on one axis."""

    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    """(percent, label in ms)."""
    total_ms: float | None


class Axis:
    """Milliseconds since ingress from `begin_ms` to `end_ms`, drawn as 0 to 100 percent."""

    def __init__(self, begin_ms: float, end_ms: float) -> None:
        self.begin_ms = begin_ms
        self.end_ms = max(end_ms, begin_ms)
        self._span_ms = self.end_ms - self.begin_ms

    def place(self, ms: float) -> float:
        return round(min(max(self.length(ms - self.begin_ms), 0.0), 100.0), 3)

    def length(self, ms: float) -> float:
        return ms / self._span_ms * 100 if self._span_ms > 0 else 0.0

    def bar(
        self, name: str, ms: float, group: str, pieces: Iterable[tuple[float, float]], total_ms: float | None
    ) -> Bar:
        """A bar whose pieces are (start, length) in ms. A negative length lies before its start."""
        pieces = list(pieces)
        ends = [sorted((self.place(start), self.place(start + length))) for start, length in pieces]
        return Bar(
            name=name,
            ms=ms,
            group=group,
            start_ms=pieces[0][0] if pieces else None,
            segments=tuple((start, round(end - start, 3)) for start, end in ends),
            share=ms / total_ms if total_ms else None,
            is_negative=ms < 0,
        )

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Round numbers along the axis, TICKS at most."""
        if self._span_ms <= 0:
            return ()
        rough = self._span_ms / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
        first = math.ceil(self.begin_ms / step)
        count = int(self.end_ms / step + 1e-9) - first + 1
        digits = max(0, -math.floor(math.log10(step)))
        return tuple((self.place(n * step), f"{n * step:,.{digits}f}") for n in range(first, first + count))
