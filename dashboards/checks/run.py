"""Asking a Prometheus every question of dashboards and rules, and what came of it."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from dashboards.checks.questions import Question
from dashboards.checks.server import Prometheus, QueryFailed

_VARIABLE = re.compile(r"\$(model|upstream|surface)\b")


class Answer(msgspec.Struct, frozen=True):
    """A question and the series that came back: [time, value] pairs."""

    question: Question
    series: list[tuple[str, list[tuple[float, float]]]]
    error: str = ""

    @property
    def is_empty(self) -> bool:
        """No number at all: no series, or NaN alone."""
        return not any(not math.isnan(value) for _, points in self.series for _, value in points)


def ask(prometheus: Prometheus, question: Question, start: float, end: float, scrape_seconds: float) -> Answer:
    """One answer; errors are kept as such."""
    expr = _VARIABLE.sub(".*", question.expr)
    expr = expr.replace("$__rate_interval", f"{max(4, math.ceil(15 * scrape_seconds))}s")
    expr = expr.replace("$__range", f"{math.ceil(end - start)}s")
    try:
        found = prometheus.instant(expr, end) if question.instant else prometheus.line(expr, start, end)
    except QueryFailed as error:
        return Answer(question, [], str(error))
    return Answer(question, [(_name(question.legend, series["metric"]), _points(series)) for series in found])


def rule_errors(prometheus: Prometheus) -> list[str]:
    """Rules that Prometheus itself could not evaluate."""
    groups = prometheus.ask("/rules")["groups"]
    return [
        f"rule {rule['name']}: {rule.get('lastError')}"
        for group in groups
        for rule in group["rules"]
        if rule["health"] == "err"
    ]


def exemplar_traces(prometheus: Prometheus, metric: str, start: float, end: float) -> list[str]:
    """Trace ids of a metric's exemplars, the newest first."""
    data = prometheus.ask("/query_exemplars", query=metric, start=start, end=end)
    found = [exemplar for series in data for exemplar in series["exemplars"]]
    found.sort(key=lambda exemplar: float(exemplar["timestamp"]), reverse=True)
    return [exemplar["labels"]["trace_id"] for exemplar in found]


def _points(series: dict[str, Any]) -> list[tuple[float, float]]:
    pairs = series["values"] if "values" in series else [series["value"]]
    return [(float(at), float(value)) for at, value in pairs]


def _name(legend: str, labels: dict[str, str]) -> str:
    if not legend:
        return " ".join(value for name, value in sorted(labels.items()) if name != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)
