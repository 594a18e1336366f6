"""The `Server-Timing` header of an upstream (https://www.w3.org/TR/server-timing/): durations in ms, by name.

Only names that mean one thing are read. Another Tokenline gateway as the upstream says its own stages; its wait for
room counts as waiting in the upstream's queue, since from here it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

from protocol.timings import Timings
from tracing.observer.adapters.evidence import Evidence
from tracing.stages import HEADER

_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"  # noqa: S105
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_METRIC = re.compile(rf"[ \t,]*({_TOKEN})((?:[ \t]*;[ \t]*(?:{_TOKEN}(?:[ \t]*=[ \t]*(?:{_TOKEN}|{_QUOTED}))?)?)*)")
_PARAMETER = re.compile(rf";[ \t]*({_TOKEN})(?:[ \t]*=[ \t]*({_TOKEN}|{_QUOTED}))?")
_REST = re.compile(r"[^,\"]*(?:\"(?:[^\"\\]|\\.)*\"?[^,\"]*)*")
"""What a metric that does not follow the grammar spoils: everything up to the next comma outside quotes."""

NAMES = {
    "tokenize": "tokenize_ms",
    "engine_tokenize": "tokenize_ms",
    "queue": "queue_ms",
    "gateway_queue": "queue_ms",
    "engine_queue": "queue_ms",
    "prefill": "prompt_ms",
    "engine_prefill": "prompt_ms",
    "decode": "predicted_ms",
    "engine_decode": "predicted_ms",
}
"""Metric name, in lower case -> field of Timings. Several metrics of one field are added up."""


def metrics_of(header: str) -> Iterator[tuple[str, float | None]]:
    """(name, duration in ms) of each metric, as they stand; None where there is no duration that is a number."""
    at = 0
    while at < len(header):
        found = _METRIC.match(header, at)
        if found is None:
            at = _REST.match(header, at).end() + 1  # type: ignore[union-attr]
            continue
        yield found[1], _duration(found[2])
        # Whatever follows a metric before the next comma is not of the grammar, and is left out.
        at = _REST.match(header, found.end()).end() + 1  # type: ignore[union-attr]


def _duration(parameters: str) -> float | None:
    for name, value in _PARAMETER.findall(parameters):
        if name.lower() == "dur":  # the first one counts
            try:
                number = float(value.strip('"'))
            except ValueError:
                return None
            return number if math.isfinite(number) and number >= 0 else None
    return None


def evidence_of_header(header: str | None) -> Evidence | None:
    """The stages that the header names, or None when it names none."""
    told: dict[str, float] = {}
    for name, duration_ms in metrics_of(header or ""):
        field = NAMES.get(name.lower())
        if field is not None and duration_ms is not None:
            told[field] = told.get(field, 0.0) + duration_ms
    return Evidence(msgspec.convert(told, Timings), HEADER) if told else None
