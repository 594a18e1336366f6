"""Wording of a window: its JSON as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracing.observer.texts import Language, duration, share, write

SHOWN_CAUSES = 3
_FIGURES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
_SHARE_FEATURES = ("uncached_share",)


def window_story(view: Mapping[str, Any], language: Language, window: str) -> str:
    """How the window was, what the slowest had in common, and what their slowness goes with."""

    def told(key: str, **values: str | None) -> str:
        return write(language, f"window.{key}", values)

    about = {"window": window, "model": view["model"]}
    times = view[f"{view['by']}_ms"]
    comma, space = ("、", "") if language == "zh" else (", ", " ")
    outcomes = comma.join(f"{outcome} {count}" for outcome, count in view["outcomes"].items())
    sentences = [told("counts", requests=str(view["requests"]), outcomes=outcomes, **about)]
    causes = comma.join(f"{one['cause']} {one['requests']}" for one in view["causes"][:SHOWN_CAUSES])
    if times is None:
        ended_badly = [sentences[0], told("none_ok", causes=causes)]
        return space.join(ended_badly) if causes else told("none", **about)
    sampled = view["sampled"]
    if sampled["rows_read"] < view["requests"]:
        sentences.append(told("newest", read=str(sampled["rows_read"])))
    if not sampled["is_complete"]:
        sentences.append(told("sampled", whole=str(sampled["rows_read_whole"])))
    for figure in (view["by"], "tpot"):
        if (found := view[f"{figure}_ms"]) is not None:
            quantiles = {name: duration(found[name] / 1e3) for name in ("p50", "p95", "p99")}
            sentences.append(told("times", figure=_FIGURES[figure], **quantiles))
    for rule in view["health"]:
        figure, ratio = _FIGURES[rule["rule"].partition("_")[0]], f"{rule['value']:.1f}"
        sentences.append(told(f"health_{rule['state']}", figure=figure, ratio=ratio, limit=f"{rule['limit']:g}"))
    sentences.append(_difference(view, language))
    sentences.append(told(f"goes.{view['goes_with']}", evidence=_evidence(view["evidence"], language)))
    if view["causes"]:
        sentences.append(told("causes", causes=causes))
    return space.join(sentences)


def _difference(view: Mapping[str, Any], language: Language) -> str:
    slow, usual = view["slowest"], view["median_half"]
    values = {"count": str(slow["requests"]), "from": duration(slow["from_ms"] / 1e3)}
    if not view["difference"]:
        return write(language, "window.no_difference", values)
    worst = view["difference"][0]
    stage = worst["stage"]
    values |= {
        "stage": stage,
        "slow": duration(slow["stages_mean_ms"][stage] / 1e3),
        "usual": duration(usual["stages_mean_ms"].get(stage, 0.0) / 1e3),
        "share": share(worst["share"]),
    }
    return write(language, "window.difference", values)


def _evidence(evidence: Mapping[str, Any], language: Language) -> str | None:
    """The features that slowness goes with: of each kind the one that tells the groups apart best."""
    parts = []
    for kind in ("time", "length"):
        telling = {name: one for name, one in evidence.get(kind, {}).items() if one["is_significant"]}
        if not telling:
            continue
        name = max(telling, key=lambda one: telling[one]["rank_correlation"])
        values = {
            key: share(telling[name][mean]) if name in _SHARE_FEATURES else f"{telling[name][mean]:.1f}"
            for key, mean in (("slow", "slowest_mean"), ("usual", "median_half_mean"))
        }
        values["feature"] = write(language, f"window.feature.{name}", {})
        parts.append(write(language, "window.evidence", values))
    return ("；" if language == "zh" else "; ").join(parts) or None
