"""What a dashboard's JSON and a rule must be like, as faults in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tracing.metrics import CATALOGUE, Metric

KINDS = frozenset({"row", "timeseries", "stat", "heatmap", "table", "bargauge", "alertlist"})
VARIABLES = ("datasource", "model", "upstream", "surface")
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_RECORDED = re.compile(r"\b[a-z_]+:[a-z0-9_]+:[a-z0-9_]+\b")
_SELECTOR = re.compile(
    r"(?P<name>(?<![:\w])(?:tokenline|gen_ai)_[a-z0-9_]+)(?P<matchers>\{[^}]*\})?(?P<range>\[[^\]]*\])?"
)
_IN_RATE = re.compile(r"\b(?:rate|increase|irate)\($")


def series_names() -> dict[str, Metric]:
    """Every series that the catalogue's metrics have, with its metric."""
    found: dict[str, Metric] = {}
    for metric in CATALOGUE:
        if metric.kind == "histogram":
            found |= {f"{metric.name}{suffix}": metric for suffix in ("_bucket", "_count", "_sum")}
        else:
            found[metric.name] = metric
    return found


_SERIES = series_names()


def expression_faults(expression: str, recorded: frozenset[str], *, panel: bool) -> Iterator[str]:
    """Names that don't exist, counters outside rate, and in panels ranges that don't follow the zoom."""
    bare = _STRINGS.sub('""', expression)
    for name in _RECORDED.findall(bare):
        if name not in recorded:
            yield f"no rule records {name}"
    for found in _SELECTOR.finditer(bare):
        name = found["name"]
        metric = _SERIES.get(name)
        if metric is None:
            yield f"{name} is not in the metrics catalogue"
            continue
        is_counted = metric.kind in ("counter", "histogram")
        in_rate = bool(_IN_RATE.search(bare[: found.start()])) and found["range"] is not None
        if is_counted and not in_rate:
            yield f"{name} counts since the start: it belongs inside rate() or increase()"
        if not is_counted and in_rate:
            yield f"{name} is a {metric.kind}: it has no rate"
    if panel:
        for window in re.findall(r"\[([^\]]*)\]", bare):
            if window not in ("$__rate_interval", "$__range"):
                yield f"[{window}] does not follow the time range: use $__rate_interval"


def board_faults(board: dict[str, Any], recorded: frozenset[str]) -> Iterator[str]:
    """Everything that is wrong with a dashboard."""
    title = board.get("title", "untitled")
    for fault in (*_frame_faults(board), *_place_faults(board["panels"])):
        yield f"{title}: {fault}"
    for panel in board["panels"]:
        for fault in _panel_faults(panel, recorded):
            yield f"{title}: {panel.get('title') or panel['id']}: {fault}"


def _frame_faults(board: dict[str, Any]) -> Iterator[str]:
    for key, kind in (("uid", str), ("title", str), ("schemaVersion", int), ("panels", list), ("time", dict)):
        if not isinstance(board.get(key), kind):
            yield f"{key} must be a {kind.__name__}"
    if len(board.get("uid", "")) > 40:
        yield "uid is longer than the 40 characters that Grafana takes"
    names = tuple(variable["name"] for variable in board["templating"]["list"])
    if names != VARIABLES:
        yield f"variables are {names}, not {VARIABLES}"
    for variable in board["templating"]["list"]:
        if variable["type"] == "query" and not _is_templated(variable):
            yield f"variable {variable['name']} has a fixed data source"
    if not board["annotations"]["list"]:
        yield "alerts are no annotations"


def _place_faults(panels: list[dict[str, Any]]) -> Iterator[str]:
    numbers = [panel["id"] for panel in panels]
    if len(set(numbers)) != len(numbers):
        yield "two panels have one id"
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place, name = panel["gridPos"], panel.get("title", panel["id"])
        if place["x"] + place["w"] > 24:
            yield f"{name} is wider than the page"
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            if cell in taken:
                yield f"{name} lies over {taken[cell]}"
                break
            taken[cell] = name


def _panel_faults(panel: dict[str, Any], recorded: frozenset[str]) -> Iterator[str]:
    kind = panel.get("type")
    if kind not in KINDS:
        yield f"type {kind!r} is not one of {sorted(KINDS)}"
    if not panel.get("title"):
        yield "has no title"
    if kind == "row":
        return
    if not panel.get("description"):
        yield "has no description"
    if kind == "alertlist":
        return
    if not panel.get("fieldConfig", {}).get("defaults", {}).get("unit"):
        yield "has no unit"
    if not panel.get("targets"):
        yield "has no query"
    references = [target["refId"] for target in panel.get("targets", [])]
    if len(set(references)) != len(references):
        yield "two queries have one refId"
    for part in (panel, *panel.get("targets", [])):
        if not _is_templated(part):
            yield "has a fixed data source"
    for target in panel.get("targets", []):
        yield from expression_faults(target["expr"], recorded, panel=True)
        if "[$__range]" in target["expr"] and not target["instant"]:
            yield "draws a line of [$__range]: use $__rate_interval"


def _is_templated(part: dict[str, Any]) -> bool:
    return bool(part.get("datasource", {}).get("uid") == "${datasource}")
