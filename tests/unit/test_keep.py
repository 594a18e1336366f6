"""The keep rule: whose spans are kept."""

from __future__ import annotations

from typing import Any

import pytest
from ledgers import HERE, ledger, whole
from meters_rig import keep_rule

from settings.schema import SloSettings
from tracing.clock import FakeClock
from tracing.ledger import Outcome
from tracing.observer.keep import KeepRule
from tracing.stages import timeline_of

KEEP: list[tuple[str, dict[str, Any], bool]] = [
    ("an ordinary request", {}, False),
    ("an upstream's error", {"outcome": Outcome.UPSTREAM_ERROR}, True),
    ("a cancellation", {"outcome": Outcome.CLIENT_CANCELLED}, True),
    ("a client's error", {"outcome": Outcome.CLIENT_ERROR}, True),
    ("a stranger's key", {"outcome": Outcome.AUTH_ERROR}, False),
    ("a slow first token", {"first_token_written": 1001.0}, True),
    ("a first token within the objective", {"first_token_written": 999.0}, False),
    ("slow tokens", {"last_token": 6000.0}, True),
    (
        "a stream that waited for nothing",
        {"first_token": None, "first_token_written": None, "finish": 1001.0},
        True,
    ),
]


@pytest.mark.parametrize(("changes", "kept"), [case[1:] for case in KEEP], ids=[case[0] for case in KEEP])
def test_kept_beside_the_share(changes: dict[str, Any], kept: bool) -> None:
    made = ledger(**changes)
    rule = keep_rule({"default": SloSettings(ttft_ms=1000, tpot_ms=100)}, 0.0)
    assert rule.keeps(made, timeline_of(made, HERE)) is kept


def test_objectives_are_per_model() -> None:
    made = ledger(first_token_written=500.0)
    rule = keep_rule({"default": SloSettings(), "m": SloSettings(ttft_ms=400)}, 0.0)
    assert rule.keeps(made, timeline_of(made, HERE))


def test_the_share_is_a_share_and_the_same_for_the_same_trace() -> None:
    rule = keep_rule({}, 0.25)
    kept = [trace for number in range(4000) if rule.in_share(trace := f"{number:032x}")]
    assert 900 < len(kept) < 1100
    assert all(rule.in_share(trace) for trace in kept)
    assert keep_rule({}, 1.0).in_share("f" * 32)
    assert not keep_rule({}, 0.0).in_share("0" * 32)


def kept(rule: KeepRule, ttft_ms: float, **changes: Any) -> bool:
    made = ledger(first_token_written=ttft_ms, **changes)
    return rule.keeps(made, timeline_of(made, HERE))


def test_the_slowest_of_a_model_in_the_window_are_kept_as_they_end() -> None:
    clock = FakeClock()
    rule = keep_rule({}, 0.0, slowest=2, clock=clock)
    assert [kept(rule, ms) for ms in (100, 200, 150, 150, 90, 300, 250, 200)] == [
        True, True, True, False, False, True, True, False,
    ]  # fmt: skip
    assert kept(rule, 90, model="other"), "another model's are others"
    made = whole()
    assert rule.keeps(made, timeline_of(made, HERE)), "and answers in one piece, whose time is their whole time"
    clock.advance_ms(59_999)
    assert not kept(rule, 200)
    clock.advance_ms(2)
    assert [kept(rule, ms) for ms in (90, 91, 90)] == [True, True, False]


def test_no_slowest_are_kept_when_none_are_asked_for() -> None:
    rule = keep_rule({}, 0.0, slowest=0)
    assert not any(kept(rule, ms) for ms in (100, 200, 300))


def test_a_stranger_is_not_among_the_slowest() -> None:
    rule = keep_rule({}, 0.0, slowest=2)
    assert not kept(rule, 100, outcome=Outcome.AUTH_ERROR)
