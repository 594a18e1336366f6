"""Labels that cannot grow without end."""

from __future__ import annotations

OTHER = "other"


class Bounded:
    """The first `limit` combinations keep their names; later ones are `other` in every part."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: set[tuple[str, ...]] = set()

    def keep(self, *labels: str) -> tuple[str, ...]:
        """The labels to use for this combination."""
        if labels in self._kept:
            return labels
        if len(self._kept) < self._limit:
            self._kept.add(labels)
            return labels
        return (OTHER,) * len(labels)


def status_label(status: int) -> str:
    """An HTTP status as a label; 0 (the client left before there was one) is `none`, nonsense is `other`."""
    if not status:
        return "none"
    return str(status) if 100 <= status <= 599 else OTHER
