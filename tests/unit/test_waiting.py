"""Which stream has waited longest, by records and by what workers say."""

from __future__ import annotations

from ledgers import HERE

from tracing.ledger import Admitted, WorkerState
from tracing.observer.waiting import MAX_FOLLOWED, Waiting


def admitted(request_id: str, ingress: int, *, worker: int = 0, model: str = "m", stream: bool = True) -> Admitted:
    return Admitted(request_id, worker, model, "chat", stream, ingress)


def state(*, worker: int = 0, **waiting: int) -> WorkerState:
    return WorkerState(worker, 1, HERE, {}, 0, waiting=waiting)


def test_the_next_one_is_the_oldest_as_soon_as_the_oldest_has_its_token() -> None:
    waiting = Waiting()
    waiting.admitted(admitted("a", 10))
    waiting.admitted(admitted("b", 20))
    waiting.report(state(m=10), 25)
    assert waiting.oldest([0]) == {"m": 10}
    waiting.answered("a")
    assert waiting.oldest([0]) == {"m": 20}
    waiting.answered("b")
    assert waiting.oldest([0]) == {}


def test_whole_answers_have_no_first_token_to_wait_for() -> None:
    waiting = Waiting()
    waiting.admitted(admitted("a", 10, stream=False))
    assert waiting.oldest([0]) == {}


def test_each_model_has_its_oldest_over_the_workers_that_live() -> None:
    waiting = Waiting()
    waiting.admitted(admitted("a", 10, worker=0))
    waiting.admitted(admitted("b", 20, worker=1))
    waiting.admitted(admitted("c", 30, worker=1, model="n"))
    assert waiting.oldest([0, 1]) == {"m": 10, "n": 30}
    assert waiting.oldest([1]) == {"m": 20, "n": 30}


def test_what_a_dead_worker_left_behind_goes_with_the_first_word_of_the_next_one() -> None:
    waiting = Waiting()
    waiting.admitted(admitted("lost", 10))
    waiting.admitted(admitted("elsewhere", 12, worker=1))
    waiting.report(state(), 50)
    assert waiting.oldest([0, 1]) == {"m": 12}
    waiting.admitted(admitted("new", 60))
    assert waiting.oldest([0]) == {"m": 60}


def test_one_from_before_the_observer_is_known_by_its_worker_s_word_until_that_changes() -> None:
    waiting = Waiting()
    waiting.report(state(m=5), 50)
    waiting.admitted(admitted("b", 20))
    assert waiting.oldest([0]) == {"m": 5}
    waiting.report(state(m=20), 60)
    assert waiting.oldest([0]) == {"m": 20}


def test_a_record_that_comes_after_its_worker_s_word_takes_its_place() -> None:
    waiting = Waiting()
    waiting.report(state(m=10), 11)
    waiting.admitted(admitted("a", 10))
    waiting.answered("a")
    assert waiting.oldest([0]) == {}


def test_what_is_followed_is_bounded_and_nothing_of_it_stays() -> None:
    waiting = Waiting()
    for number in range(MAX_FOLLOWED + 10):
        waiting.admitted(admitted(str(number), number))
    for number in range(MAX_FOLLOWED + 10):
        waiting.answered(str(number))
    assert waiting.oldest([0]) == {}
    assert (waiting._places, waiting._ingress) == ({}, {})
