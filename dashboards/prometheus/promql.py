"""Pieces of PromQL that rules and panels are put together from."""

from __future__ import annotations

import msgspec

_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))


def duration(seconds: float) -> str:
    """A duration in the largest unit that is whole: 90 -> 90s, 300 -> 5m."""
    ms = max(1, round(seconds * 1000))
    unit, size = next((unit, size) for unit, size in _UNITS if ms % size == 0)
    return f"{ms // size}{unit}"


class Windows(msgspec.Struct, frozen=True):
    """Lengths of windows and holds. `scale` shortens all of them alike, to see in seconds what takes hours."""

    scale: float = 1.0

    def __call__(self, seconds: float) -> str:
        return duration(seconds * self.scale)


def selected(metric: str, *matchers: str) -> str:
    """`metric{a="b",c="d"}`; empty matchers are left out."""
    inside = ",".join(matcher for matcher in matchers if matcher)
    return f"{metric}{{{inside}}}" if inside else metric


def rate(metric: str, window: str, *matchers: str) -> str:
    return f"rate({selected(metric, *matchers)}[{window}])"


def increase(metric: str, window: str, *matchers: str) -> str:
    return f"increase({selected(metric, *matchers)}[{window}])"


def summed(expression: str, *by: str) -> str:
    """Summed over everything but the labels named."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def quantile(q: float, histogram: str, window: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """A quantile of what was observed within the window: never of a lifetime."""
    return f"histogram_quantile({q:g}, {summed(rate(f'{histogram}_bucket', window, *matchers), 'le', *by)})"


def mean(histogram: str, window: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """The mean of what was observed within the window."""
    return (
        f"{summed(rate(f'{histogram}_sum', window, *matchers), *by)}"
        f" / {summed(rate(f'{histogram}_count', window, *matchers), *by)}"
    )


def or_zero(part: str, whole: str) -> str:
    """`part`, and 0 where only `whole` has series: a counter that never counted has none."""
    return f"({part} or 0 * {whole})"
