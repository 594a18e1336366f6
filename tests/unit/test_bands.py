"""Bands: where a request's TTFT lies in its model's last hour, and where the time of each band went."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from ledgers import HERE, ledger, timings, whole

from tracing.clock import FakeClock
from tracing.ledger import Ledger, Outcome
from tracing.observer.bands import BANDS, MAX_MODELS, MIN_REQUESTS, SLOT_NS, SLOTS, Bands
from tracing.observer.rows import Row
from tracing.stages import timeline_of


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.seconds: dict[tuple[str, str, str], float] = defaultdict(float)
        self.bands = Bands(self.clock, self._count, self._add)

    def _count(self, model: str, band: str) -> None:
        self.requests[model, band] += 1

    def _add(self, model: str, band: str, stage: str, seconds: float) -> None:
        self.seconds[model, band, stage] += seconds

    def tell(self, made: Ledger) -> str | None:
        """The band that the request fell into."""
        before = self.requests.copy()
        timeline = timeline_of(made, HERE)
        self.bands.told(Row(made, timeline, HERE, True))
        found = self.requests - before
        return next(iter(found))[1] if found else None

    def learn(self, count: int = 1000, model: str = "m") -> None:
        """TTFTs of 100 ms to 1099 ms, evenly, in an order that mixes them."""
        for number in range(count):
            self.tell(ttft(100 + number * 617 % 1000, model=model))
        self.clock.advance_ms(1000)


def ttft(ms: float, **changes: Any) -> Ledger:
    """A stream whose whole TTFT beyond 80 ms is the relay's."""
    return ledger(first_token_written=ms, **changes)


UNANSWERED = {"first_event": None, "first_token": None, "first_visible": None, "first_token_written": None,
              "last_token": None, "timings": None}  # fmt: skip

CASES: list[tuple[str, Ledger, str | None]] = [
    ("fast", ttft(120), "p0-50"),
    ("below the median", ttft(580), "p0-50"),
    ("above the median", ttft(620), "p50-95"),
    ("below p95", ttft(1025), "p50-95"),
    ("above p95", ttft(1070), "p95-99"),
    ("above p99", ttft(1120), "p99+"),
    ("cancelled in its stream", ttft(1120, outcome=Outcome.CLIENT_CANCELLED), "p99+"),
    (
        "never had a token, waited longest",
        ledger(**UNANSWERED, outcome=Outcome.UPSTREAM_TIMEOUT, finish=9000.0),
        "p99+",
    ),
    ("never had a token, failed at once", ledger(**UNANSWERED, outcome=Outcome.UPSTREAM_ERROR, finish=200.0), None),
    ("in one piece", whole(finish=9000.0), None),
    ("of no model", ttft(1120, routed=None), None),
]


@pytest.mark.parametrize(("made", "band"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_request_falls_into_the_band_of_its_ttft(made: Ledger, band: str | None) -> None:
    rig = Rig()
    rig.learn()
    assert rig.tell(made) == band


def test_the_shares_of_the_bands_are_those_of_their_names() -> None:
    rig = Rig()
    rig.learn()
    rig.requests.clear()
    rig.learn(3000)
    shares = [rig.requests["m", band] / 3000 for band in BANDS]
    assert shares == pytest.approx([0.5, 0.45, 0.04, 0.01], abs=0.02)


def test_each_bands_seconds_are_the_stages_of_its_requests() -> None:
    rig = Rig()
    rig.learn()
    rig.seconds.clear()
    rig.tell(ttft(1120))
    rig.tell(ttft(1220, timings=timings(scheduled=40.5)))
    found = {stage: seconds for (_, band, stage), seconds in rig.seconds.items() if band == "p99+"}
    assert found["engine_queue"] == pytest.approx(0.018 + 0.028)
    assert sum(found.values()) == pytest.approx(1.12 + 1.22)
    assert {band for _, band, _ in rig.seconds} == {"p99+"}


def test_a_negative_stage_is_no_time_spent() -> None:
    rig = Rig()
    rig.learn()
    rig.seconds.clear()
    rig.tell(ttft(1120, timings=timings(received=8.0)))
    assert ("m", "p99+", "transit_out") not in rig.seconds
    assert all(seconds > 0 for seconds in rig.seconds.values())


def test_the_first_requests_of_a_model_are_compared_with_nobody() -> None:
    rig = Rig()
    for _ in range(MIN_REQUESTS):
        assert rig.tell(ttft(200)) is None
    assert rig.tell(ttft(900)) == "p99+"


def test_the_distribution_is_of_the_last_hour() -> None:
    rig = Rig()
    rig.learn()
    rig.clock.advance_ms(SLOT_NS / 1e6 * (SLOTS // 2))
    for _ in range(1000):
        rig.tell(ttft(5000))
    rig.clock.advance_ms(1000)
    assert rig.tell(ttft(5000)) != "p99+", "half of the last hour's were as slow"
    rig.clock.advance_ms(SLOT_NS / 1e6 * (SLOTS // 2))
    rig.clock.advance_ms(1000)
    assert rig.tell(ttft(2000)) == "p0-50", "the fast ones are over an hour old"
    rig.clock.advance_ms(SLOT_NS / 1e6 * SLOTS)
    assert rig.tell(ttft(9000)) is None, "everything is"


def test_models_are_compared_with_themselves_and_their_number_is_bounded() -> None:
    rig = Rig()
    rig.learn(model="slow")
    for _ in range(50):
        rig.tell(ttft(90, model="quick"))
    rig.clock.advance_ms(1000)
    assert rig.tell(ttft(120, model="quick")) == "p99+"
    assert rig.tell(ttft(120, model="slow")) == "p0-50"
    for number in range(2 * MAX_MODELS):
        rig.tell(ttft(100, model=f"m{number}"))
    assert len(rig.bands._distributions) == MAX_MODELS + 1
