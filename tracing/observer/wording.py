"""Wording: a finding and its evidence as sentences."""

from __future__ import annotations

from functools import reduce
from typing import Any

from settings.schema import Settings
from tracing.ledger import CLIENT_TOO_SLOW, Outcome
from tracing.metrics import PROMPT_SIZES
from tracing.observer.baseline import ENOUGH_REQUESTS, ClassKey
from tracing.observer.causes import Cause, Finding
from tracing.observer.evidence import AFTER_STAGES, Evidence, Figure
from tracing.observer.failures import died_in
from tracing.observer.rules import KV_HEADROOM
from tracing.observer.texts import Language, duration, placeholders, share, texts, write

SHOWN_STAGES = 3
SHOWN_SHARE = 0.05
"""Of the total excess: below it a stage isn't told in words."""

_SHARES = frozenset({"lag_share", "cached"})
_COUNTS = frozenset({"computed", "computed_usual", "prompt", "output", "output_usual", "preemptions", "unsent"})
_BATCHES = frozenset({"batch", "batch_usual"})
_FIGURES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
_NOT_OURS = ("engine.", "model.", "scheduler.", "token_interval.")
"""Settings of the co-located engine; of another engine only the last part of the name means anything."""

Values = dict[str, str | None]


class Wording:
    """Writes in one language, with the values of these settings."""

    def __init__(self, settings: Settings, language: Language) -> None:
        self._settings = settings
        self._language: Language = language

    def story(self, evidence: Evidence, finding: Finding, key: ClassKey, class_requests: int, *, complete: bool) -> str:
        """How it compares, why, and what the engine was like."""
        values = self._values(evidence, finding, key, class_requests)
        sentences = [*self._headline(evidence, finding, values), self._reason(finding, values)]
        if not finding.failed:
            sentences += self._worst_stages(evidence, finding)
        sentences += self._engine_state(evidence)
        if not complete:
            sentences.append(self._write("unfinished", {}))
        return ("" if self._language == "zh" else " ").join(sentences)

    def advice(self, evidence: Evidence, finding: Finding) -> str:
        """What to do."""
        key = f"advice.{finding.remedy.name}"
        values: Values = dict(self._evidence_values(evidence, finding))
        for name in placeholders(texts(self._language)[key]):
            if "." in name:
                values[name] = self._setting(name, evidence)
        return self._write(key, values)

    def class_words(self, key: ClassKey, *, any_size: bool = False) -> str:
        """A class of requests, as the object of a count."""
        if any_size:
            size = self._write("size_any", {})
        elif key.size.startswith("le_"):
            high = int(key.size.removeprefix("le_"))
            low = max((bound for bound in PROMPT_SIZES if bound < high), default=0) + 1
            size = self._write("size", {"low": str(low), "high": str(high)})
        elif key.size.startswith("gt_"):
            size = self._write("size_up", {"low": key.size.removeprefix("gt_")})
        else:
            size = self._write("size_unknown", {})
        kind = self._write("streams" if key.stream else "whole", {})
        return self._write("class", {"kind": kind, "model": key.model, "upstream": key.upstream, "size": size})

    def _write(self, key: str, values: Values) -> str:
        return write(self._language, key, values)

    def _headline(self, evidence: Evidence, finding: Finding, values: Values) -> list[str]:
        ledger = evidence.ledger
        if finding.failed:
            return [self._write("refused" if finding.remedy.cause is Cause.NONE else "failed", values)]
        ending = "cut_off" if ledger.error_code == CLIENT_TOO_SLOW else "cancelled"
        found = [self._write(ending, values)] if ledger.outcome is Outcome.CLIENT_CANCELLED else []
        figure = _told_figure(evidence, finding)
        if figure is None:
            return [*found, self._write("no_baseline", values)]
        is_client = finding.remedy.cause is Cause.SLOW_CLIENT
        key = "slow" if figure.is_slow else "late_for_client" if is_client else "not_slow"
        found.append(self._write(key, values | self._figure_values(figure)))
        if int(values["class_requests"] or 0) < ENOUGH_REQUESTS:
            found.append(self._write("borrowed", values))
        return found

    def _figure_values(self, figure: Figure) -> Values:
        p50, p95, _ = figure.usual
        return {
            "figure": _FIGURES.get(figure.name) or self._write("wait", {}),
            "value": duration(figure.value),
            "ratio": f"{figure.value / p50:.1f}" if p50 else None,
            "p50": duration(p50),
            "p95": duration(p95),
        }

    def _reason(self, finding: Finding, values: Values) -> str:
        return self._write(f"reason.{finding.remedy.name}", values)

    def _worst_stages(self, evidence: Evidence, finding: Finding) -> list[str]:
        worst = [one for one in evidence.excess[:SHOWN_STAGES] if one.share >= SHOWN_SHARE] if evidence.slow else []
        if [one.stage for one in worst] == [finding.stage]:
            return []  # the reason has told it
        told = [
            self._write("excess_stage", {"stage": one.stage, "over": duration(one.seconds), "share": share(one.share)})
            for one in worst
        ]
        comma = "、" if self._language == "zh" else ", "
        return [self._write("excess", {"stages": comma.join(told)})] if told else []

    def _engine_state(self, evidence: Evidence) -> list[str]:
        found = []
        if (engine := evidence.engine) is not None:
            values: Values = {
                "running": str(engine.running),
                "waiting": str(engine.waiting),
                "kv": share(engine.kv_usage),
            }
            found.append(self._write("state", values))
        if (cached := evidence.cached_share) is not None:
            found.append(self._write("cached", {"cached": share(cached)}))
        if engine is not None and 1 - engine.kv_usage < KV_HEADROOM:
            found.append(self._write("headroom", {}))
        return found

    def _values(self, evidence: Evidence, finding: Finding, key: ClassKey, class_requests: int) -> Values:
        baseline = evidence.baseline
        borrowed = baseline.is_enough and class_requests < ENOUGH_REQUESTS
        return self._evidence_values(evidence, finding) | {
            "class": self.class_words(key, any_size=borrowed),
            "class_requests": str(class_requests),
            "requests": str(baseline.requests),
            "enough": str(ENOUGH_REQUESTS),
        }

    def _evidence_values(self, evidence: Evidence, finding: Finding) -> Values:
        stage, ledger = finding.stage, evidence.ledger
        took = evidence.stages.get(stage) if stage else None
        compared = evidence.baseline.is_enough and took is not None and stage is not None
        over = evidence.over(stage) if compared and stage else 0.0
        e2e = evidence.row.timeline.e2e
        values: Values = {
            "stage": stage,
            "took": None if took is None else duration(took),
            "over": duration(over) if over > 0 else None,
            "total": None if e2e is None else duration(e2e),
            "upstream": ledger.upstream,
            "outcome": ledger.outcome.value,
            "died_in": died_in(ledger),
        }
        return values | {name: _written(name, value) for name, value in finding.numbers.items()}

    def _setting(self, dotted: str, evidence: Evidence) -> str:
        """A setting by name, with its value now; of an engine that isn't ours just the name."""
        if dotted.startswith(_NOT_OURS) and not evidence.engine_settings.is_ours:
            name = dotted.rpartition(".")[2]
            return self._write("foreign_setting", {"name": name, "upstream": evidence.ledger.upstream})
        value: Any = reduce(getattr, dotted.split("."), self._settings)
        if value is None:
            return self._write("own_setting_only", {"name": dotted})
        return self._write("own_setting", {"name": dotted, "value": _setting_value(value)})


def _told_figure(evidence: Evidence, finding: Finding) -> Figure | None:
    """The figure that the story begins with: one that is slow, and that the finding's stage is part of."""
    figures = {figure.name: figure for figure in evidence.figures}
    is_late = finding.stage in (*AFTER_STAGES, "engine_decode")
    if not is_late:
        order = ("ttft", "wait", "e2e", "tpot")
    elif finding.remedy.cause is Cause.LONG_OUTPUT:
        order = ("e2e", "tpot", "ttft", "wait")
    else:
        order = ("tpot", "e2e", "ttft", "wait")
    present = [figures[name] for name in order if name in figures]
    return next((figure for figure in present if figure.is_slow), present[0] if present else None)


def _written(name: str, value: str | float | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if name in _SHARES:
        return share(value)
    if name in _COUNTS:
        return f"{value:.0f}"
    return f"{value:.1f}" if name in _BATCHES else duration(value)


def _setting_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
