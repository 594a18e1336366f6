"""SLO counters on a clock of the test: each request ends good or bad, once for each objective, at the right moment."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from ledgers import BASE_NS, ELSEWHERE, HERE, attempt, ledger, numbered, timings, whole

from protocol.timings import Timings
from settings.schema import SloSettings
from tracing.clock import FakeClock
from tracing.ledger import Admitted, FirstToken, Ledger, Outcome, WorkerState
from tracing.observer import slo
from tracing.observer.slo import Objectives, SloCounter
from tracing.stages import timeline_of

TTFT_MS, TPOT_MS = 1000.0, 100.0
UNANSWERED = {"first_event": None, "first_token": None, "first_visible": None, "first_token_written": None,
              "last_token": None, "timings": None}  # fmt: skip


class Rig:
    """A counter, and what it counted: {(objective, good): requests}."""

    def __init__(self, mono: int = BASE_NS) -> None:
        self.clock = FakeClock(mono=mono)
        self.counted: Counter[tuple[str, bool]] = Counter()
        self.models: list[str] = []
        self.slo = SloCounter(self.objectives(), self.clock, self._count)

    @staticmethod
    def objectives() -> Objectives:
        return Objectives({"default": SloSettings(ttft_ms=TTFT_MS, tpot_ms=TPOT_MS), "fast": SloSettings(ttft_ms=50)})

    def _count(self, model: str, objective: str, good: bool) -> None:
        self.counted[objective, good] += 1
        self.models.append(model)

    def admit(self, made: Ledger) -> None:
        self.slo.admitted(Admitted(made.request_id, made.worker, made.model, made.surface, made.stream, made.ingress))

    def answer(self, made: Ledger) -> None:
        ttft_ns = made.first_token_written - made.ingress
        self.slo.first_token(FirstToken(made.request_id, 0, made.model, made.upstream, made.surface, ttft_ns))

    def close(self, made: Ledger) -> None:
        timeline = timeline_of(made, HERE)
        self.slo.closed(made, timeline)
        self.slo.told(made, timeline)

    def reports(self, worker: int = 0, **waiting: int) -> None:
        self.slo.worker(WorkerState(worker, 1, HERE, {}, 0, waiting=waiting))

    def after(self, ms: float) -> dict[tuple[str, bool], int]:
        self.clock.advance_ms(ms)
        self.slo.tick()
        return dict(self.counted)


GOOD, BAD = {("ttft", True): 1}, {("ttft", False): 1}
CUT = {"outcome": Outcome.UPSTREAM_ERROR}
CANCELLED = {"outcome": Outcome.CLIENT_CANCELLED}
HELD_UP = {
    "admitted": 940.0,
    "attempts": [attempt(connect_start=940.0, connected=940.0, request_sent=940.0, end=1300.0)],
    "upstream_end": 1300.0,
    "finish": 1301.0,
}
"""940 ms in the gateway; with 65 ms in the engine that is over the objective."""
UNTOLD = Timings(prompt_ms=45.0, predicted_ms=100.0)

ENDS: list[tuple[str, Ledger, dict[tuple[str, bool], int]]] = [
    ("a good stream", ledger(), {("ttft", True): 1, ("tpot", True): 1}),
    ("at the objective exactly", ledger(first_token_written=1000.0), {("ttft", True): 1, ("tpot", True): 1}),
    ("a late first token", ledger(first_token_written=1000.001), {("ttft", False): 1, ("tpot", True): 1}),
    ("slow tokens", ledger(last_token=5081.0), {("ttft", True): 1, ("tpot", False): 1}),
    ("one token has no gap", ledger(usage=msgspec.structs.replace(ledger().usage, output_tokens=1)), GOOD),
    ("an upstream's error before the first token", ledger(**UNANSWERED, **CUT), BAD),
    ("a timeout before the first token", ledger(**UNANSWERED, outcome=Outcome.UPSTREAM_TIMEOUT), BAD),
    ("the gateway's own error", ledger(**UNANSWERED, outcome=Outcome.GATEWAY_ERROR), BAD),
    ("refused for lack of room", ledger(**UNANSWERED, attempts=[], outcome=Outcome.QUEUE_REJECTED), BAD),
    ("an error in the stream", ledger(**CUT), {("ttft", True): 1, ("tpot", False): 1}),
    ("a client's error", ledger(**UNANSWERED, outcome=Outcome.CLIENT_ERROR), {}),
    ("a stranger", ledger(**UNANSWERED, outcome=Outcome.AUTH_ERROR), {}),
    ("over its own rate limit", ledger(**UNANSWERED, outcome=Outcome.RATE_LIMITED), {}),
    ("left at once", ledger(**UNANSWERED, **CANCELLED, client_gone=500.0), {}),
    ("left after too long a wait", ledger(**UNANSWERED, **CANCELLED, client_gone=1001.0), BAD),
    ("left in the stream, in time", ledger(**CANCELLED, client_gone=181.0), {("ttft", True): 1, ("tpot", True): 1}),
    ("left in a stream that had stalled", ledger(**CANCELLED, client_gone=5300.0),
     {("ttft", True): 1, ("tpot", False): 1}),
    ("ended well without a token", ledger(**UNANSWERED), GOOD),
    ("ended well without a token, late", ledger(**UNANSWERED, finish=1001.0), BAD),
    ("whole, the engine tells in time", whole(), GOOD),
    ("whole, the engine tells late", whole(timings=timings(prefill_end=1012.0)), BAD),
    ("whole, held up in the gateway", whole(timings=timings(ELSEWHERE), **HELD_UP), BAD),
    ("whole, on another host, told in time", whole(timings=timings(ELSEWHERE)), GOOD),
    ("whole, told without its wait", whole(timings=UNTOLD), {}),
    ("whole, told nothing, however long", whole(timings=None, finish=60_000.0), {}),
    ("whole, an upstream's error", whole(**CUT), BAD),
    ("whole, left early, told nothing", whole(timings=None, **CANCELLED, client_gone=500.0), {}),
    ("whole, left late, told nothing", whole(timings=None, **CANCELLED, client_gone=1001.0), BAD),
    ("whole, left late, but its token was there", whole(**CANCELLED, client_gone=9000.0), GOOD),
    ("no answer of tokens", whole(surface="models", timings=None, outcome=Outcome.UPSTREAM_ERROR), {}),
    ("vectors", whole(surface="embeddings", timings=None), {}),
]  # fmt: skip


@pytest.mark.parametrize(("made", "counted"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_how_a_request_ends(made: Ledger, counted: dict[tuple[str, bool], int]) -> None:
    rig = Rig()
    rig.close(made)
    assert dict(rig.counted) == counted
    followed = Rig()
    followed.admit(made)
    if made.first_token_written:
        followed.answer(made)
    followed.close(made)
    assert dict(followed.counted) == counted, "counted once, whether its records came or only its end"


def test_a_waiting_request_turns_bad_when_its_time_passes_and_is_not_counted_again() -> None:
    rig = Rig()
    rig.admit(ledger())
    assert rig.after(TTFT_MS) == {}
    assert rig.after(0.001) == BAD
    late = ledger(first_token_written=3000.0)
    rig.answer(late)
    rig.close(late)
    assert rig.counted["ttft", False] == 1
    assert rig.counted["ttft", True] == 0


def test_a_first_token_in_time_is_good_at_once_and_does_not_turn_bad() -> None:
    rig = Rig()
    rig.admit(ledger())
    rig.answer(ledger())
    assert dict(rig.counted) == GOOD
    assert rig.after(10 * TTFT_MS) == GOOD


def test_a_whole_answer_on_its_way_is_not_late() -> None:
    rig = Rig()
    rig.admit(whole())
    assert rig.after(10 * TTFT_MS) == {}


def test_every_model_has_its_own_objective() -> None:
    rig = Rig()
    rig.admit(numbered(1))
    rig.admit(numbered(2, model="fast"))
    assert rig.after(51) == BAD
    assert rig.models == ["fast"]


def test_many_waiting_requests_turn_bad_in_the_order_of_their_times_and_once_each() -> None:
    rig = Rig()
    for number in range(100):
        made = msgspec.structs.replace(numbered(number), ingress=BASE_NS + (number * 37 % 100) * 10**7)
        rig.admit(made)
    assert rig.after(TTFT_MS + 495) == {("ttft", False): 50}
    for number in range(0, 100, 2):
        rig.close(numbered(number, **UNANSWERED, **CUT))
    assert rig.after(10 * TTFT_MS)["ttft", False] == 100


def test_a_request_that_waits_for_room_turns_bad_by_its_workers_word() -> None:
    rig = Rig()
    ingress = rig.clock.mono_ns()
    made = msgspec.structs.replace(numbered(1, first_token_written=3000.0), ingress=ingress)
    rig.clock.advance_ms(TTFT_MS)
    rig.reports(m=ingress)
    assert dict(rig.counted) == {}
    rig.clock.advance_ms(1)
    rig.reports(m=ingress)
    rig.reports(m=ingress)
    assert dict(rig.counted) == BAD
    rig.admit(made)
    assert rig.after(10 * TTFT_MS) == BAD
    rig.answer(made)
    rig.close(made)
    assert rig.counted["ttft", False] == 1
    assert rig.counted["ttft", True] == 0


def test_the_workers_word_does_not_count_a_request_that_is_followed_or_a_whole_answer() -> None:
    rig = Rig()
    ingress = rig.clock.mono_ns()
    rig.admit(msgspec.structs.replace(whole(), ingress=ingress))
    rig.clock.advance_ms(2 * TTFT_MS)
    rig.reports(m=ingress)
    assert dict(rig.counted) == {}
    rig.reports(worker=1, m=ingress)
    assert dict(rig.counted) == BAD, "the same instant at another worker is another request"


def test_a_new_observer_counts_at_their_ends_what_it_finds_under_way() -> None:
    rig = Rig(mono=BASE_NS + 5 * 10**9)
    rig.reports(m=BASE_NS)
    late = ledger(first_token_written=6000.0)
    rig.answer(late)
    assert dict(rig.counted) == {}, "it may have been followed by the observer before: its end says it all"
    rig.close(late)
    assert rig.counted["ttft", False] == 1


def test_what_is_remembered_is_bounded_and_the_rest_is_counted_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slo, "MAX_WAITING", 10)
    rig = Rig()
    for number in range(100):
        rig.admit(numbered(number))
    assert rig.after(TTFT_MS + 1) == {("ttft", False): 10}
    for number in range(100):
        rig.close(numbered(number, first_token_written=2000.0))
    assert rig.counted["ttft", False] == 100


def test_requests_of_a_worker_that_died_are_forgotten() -> None:
    rig = Rig()
    rig.admit(ledger())
    rig.after(slo.FORGET_NS / 1e6 + 1)
    assert not rig.slo._requests
    assert not rig.slo._admitted
    assert rig.counted["ttft", False] == 1


def test_the_heap_of_times_does_not_grow_with_requests_that_were_answered() -> None:
    rig = Rig()
    for number in range(5000):
        made = numbered(number)
        rig.admit(made)
        rig.answer(made)
        rig.close(made)
    rig.slo.tick()
    assert len(rig.slo._due) <= 1000
    assert rig.counted["ttft", True] == 5000


def test_an_answer_in_one_piece_is_judged_when_the_engines_span_came(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    untold, told = whole(timings=None), whole(timings=timings(ELSEWHERE))
    rig.slo.closed(untold, timeline_of(untold, HERE))
    assert dict(rig.counted) == {}
    rig.slo.told(told, timeline_of(told, HERE))
    assert dict(rig.counted) == GOOD


def test_first_token_seconds_of_a_whole_answer_begin_at_ingress() -> None:
    assert slo.first_token_seconds(timeline_of(whole(), HERE)) == pytest.approx(0.0755)
    some: Any = slo.first_token_seconds(timeline_of(whole(timings=timings(ELSEWHERE)), HERE))
    assert some == pytest.approx(0.009 + 0.065), "the other host's transit is left out"
