"""Requests that were slow in one place, and a judge who knows what is usual. For tests of the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from ledgers import ATTEMPT_MS, ENGINE_MS, HERE, LEDGER_MS, WALL_NS, at, ledger

from protocol.timings import EngineMarks
from settings.schema import Settings
from tracing.ledger import Ledger
from tracing.observer.baseline import Baselines
from tracing.observer.rows import Row
from tracing.observer.texts import Language
from tracing.observer.verdict import Judge, Judged
from tracing.stages import timeline_of


def row_of(made: Ledger, *, kept: bool = True) -> Row:
    """The row of a ledger that was written here."""
    return Row(made, timeline_of(made, HERE), HERE, kept)


def delayed(mark_ms: float, by_ms: float, made: Ledger | None = None, **changes: Any) -> Ledger:
    """A ledger whose marks from `mark_ms` on came `by_ms` later: the stage that ends there took that much longer."""
    made = ledger(**changes) if made is None else made
    first, delay = at(mark_ms), round(by_ms * 1e6)

    def later(mark: int | None) -> int | None:
        return mark + delay if mark is not None and mark >= first else mark

    for name in LEDGER_MS:
        setattr(made, name, later(getattr(made, name)))
    for attempt in made.attempts:
        for name in ATTEMPT_MS:
            setattr(attempt, name, later(getattr(attempt, name)))
    if made.timings is not None and made.timings.marks is not None:
        marks = EngineMarks(**{name: later(getattr(made.timings.marks, name)) for name in ENGINE_MS})
        made.timings = msgspec.structs.replace(made.timings, marks=marks)
    return made


class Court:
    """Baselines that are filled by hand, settings, and a judge."""

    def __init__(self, **sections: Any) -> None:
        self.baselines = Baselines()
        self.settings = Settings.model_validate({"state_dir": Path("/nowhere"), **sections})

    def knows(self, made: Ledger | None = None, requests: int = 120) -> Court:
        """Adds the same request many times: what is usual."""
        row = row_of(ledger() if made is None else made)
        for _ in range(requests):
            self.baselines.add(row)
        return self

    def judge(self, made: Ledger) -> Judged:
        return Judge(self.baselines, self.settings, WALL_NS).judge(row_of(made))

    def explain(self, made: Ledger, language: Language = "en", *, complete: bool = True) -> dict[str, Any]:
        return Judge(self.baselines, self.settings, WALL_NS).explain(row_of(made), language, complete=complete)

    def verdict(self, made: Ledger, language: Language = "en") -> dict[str, Any]:
        found: dict[str, Any] = self.explain(made, language)["verdict"]
        return found
