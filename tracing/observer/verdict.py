"""The verdict of one request: one cause, one action, and how sure that is. Made when somebody asks, never before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from settings.schema import Settings
from tracing.ledger import Outcome
from tracing.observer.baseline import Baseline, Baselines, ClassKey, class_of
from tracing.observer.causes import Cause, Confidence, Finding
from tracing.observer.evidence import EngineSettingsNow, Evidence
from tracing.observer.failures import cause_of_failure
from tracing.observer.rows import Row, milliseconds
from tracing.observer.rules import cause_of
from tracing.observer.texts import Language
from tracing.observer.wording import Wording

SURE_REQUESTS = 100
"""A baseline of fewer never makes a verdict certain."""
SURE_SHARE = 0.6
UNSURE_SHARE = 1 / 3
"""Of the excess that is to blame: what its worst stage must have for confidence `high`, and for more than `low`."""

Compared = Literal["class", "all_sizes", "none"]
_TIMES = ("ttft", "tpot", "e2e")
_COUNTS = ("prompt_tokens", "computed_tokens", "output_tokens", "mean_batch")


class Comparison(msgspec.Struct, frozen=True):
    """What a request is compared with."""

    key: ClassKey
    class_requests: int
    """In its own class."""
    baseline: Baseline
    """Of its class, or of all prompt sizes where its class is too new."""
    compared_with: Compared


class Judged(msgspec.Struct, frozen=True):
    """A request and what was found about it."""

    evidence: Evidence
    comparison: Comparison
    finding: Finding
    confidence: Confidence


class Judge:
    """Judges rows against the baselines of one moment. Cheap to make; keeps what it looked up."""

    def __init__(self, baselines: Baselines, settings: Settings, now_ns: int) -> None:
        self._baselines = baselines
        self._settings = settings
        self._now_ns = now_ns
        self._comparisons: dict[ClassKey, Comparison] = {}

    def judge(self, row: Row) -> Judged:
        """The cause, and how sure it is."""
        comparison = self._compare(class_of(row.ledger))
        evidence = Evidence(row, comparison.baseline, EngineSettingsNow.of(self._settings, row.ledger.upstream))
        finding = cause_of_failure(row.ledger) or cause_of(evidence)
        return Judged(evidence, comparison, finding, _confidence(evidence, comparison, finding))

    def explain(self, row: Row, language: Language, *, complete: bool = True) -> dict[str, Any]:
        """The keys `verdict` and `baseline` of a request's JSON. `complete`: nothing more will become known of it."""
        judged = self.judge(row)
        wording = Wording(self._settings, language)
        finding, evidence = judged.finding, judged.evidence
        return {
            "verdict": {
                "cause": finding.remedy.cause.value,
                "action": wording.advice(evidence, finding),
                "action_id": finding.remedy.action,
                "confidence": judged.confidence.value,
                "stage": finding.stage,
                "excess": [
                    {"stage": stage, "ms": milliseconds(seconds), "share": round(share, 4)}
                    for stage, seconds, share in evidence.excess
                ],
                "compared_with": judged.comparison.compared_with,
                "text": wording.story(
                    evidence, finding, judged.comparison.key, judged.comparison.class_requests, complete=complete
                ),
            },
            "baseline": baseline_view(judged.comparison),
        }

    def advice(self, judged: Judged, language: Language) -> str:
        """What to do, in words."""
        return Wording(self._settings, language).advice(judged.evidence, judged.finding)

    def causes(self, rows: Iterable[Row]) -> list[tuple[Cause, Confidence]]:
        """The cause of each row, in order, for lists."""
        return [(judged.finding.remedy.cause, judged.confidence) for judged in map(self.judge, rows)]

    def _compare(self, key: ClassKey) -> Comparison:
        found = self._comparisons.get(key)
        if found is None:
            found = self._comparisons[key] = self._look_up(key)
        return found

    def _look_up(self, key: ClassKey) -> Comparison:
        own = self._baselines.of(key, self._now_ns)
        if own.is_enough:
            return Comparison(key, own.requests, own, "class")
        wider = self._baselines.of_all_sizes(key, self._now_ns)
        if wider.is_enough:
            return Comparison(key, own.requests, wider, "all_sizes")
        return Comparison(key, own.requests, own, "none")


def baseline_view(comparison: Comparison) -> dict[str, Any]:
    """The baseline as JSON: `requests` and `class` are the request's own, the quantiles those it is compared with."""
    baseline, key = comparison.baseline, comparison.key
    figures: dict[str, Any] = {f"{name}_ms": _quantiles(baseline, name, 1e3) for name in _TIMES}
    figures |= {name: _quantiles(baseline, name, 1) for name in _COUNTS}
    return {
        "requests": comparison.class_requests,
        "class": key.size,
        "model": key.model,
        "upstream": key.upstream,
        "stream": key.stream,
        "compared_with": comparison.compared_with,
        "stages": {
            name: {f"{quantile}_ms": value for quantile, value in (_quantiles(baseline, name, 1e3) or {}).items()}
            for name in baseline.stages()
        },
        "figures": {name: found for name, found in figures.items() if found is not None},
    }


def _quantiles(baseline: Baseline, name: str, scale: float) -> dict[str, float] | None:
    found = baseline.of(name)
    return None if found is None else {key: round(value * scale, 6) for key, value in found._asdict().items()}


def _confidence(evidence: Evidence, comparison: Comparison, finding: Finding) -> Confidence:
    """Low: no baseline of its own class, an unknown cause, or a cause with a small part in it. High: see SURE_*."""
    if finding.failed:
        return Confidence.HIGH if finding.certain else Confidence.LOW
    if comparison.compared_with != "class" or finding.remedy.cause is Cause.UNKNOWN:
        return Confidence.LOW
    share = _part_of_blame(evidence, finding)
    if share < UNSURE_SHARE:
        return Confidence.LOW
    is_sure = finding.certain and share >= SURE_SHARE and comparison.class_requests >= SURE_REQUESTS
    cancelled = evidence.ledger.outcome is Outcome.CLIENT_CANCELLED  # what would have come is not known
    return Confidence.HIGH if is_sure and not cancelled else Confidence.MEDIUM


def _part_of_blame(evidence: Evidence, finding: Finding) -> float:
    """The part that the finding's stage has in the excess of the stages that are to blame; 1 where none is."""
    if not evidence.slow or finding.stage is None:
        return 1.0
    if finding.remedy.cause is Cause.GATEWAY_BUSY:
        part = finding.numbers["lag_share"]
        return part if isinstance(part, float) else 0.0
    total = sum(evidence.suspects.values())
    return evidence.suspects.get(finding.stage, 0.0) / total if total else 0.0
