"""Admission: places, the queue for them, everybody who leaves it early, and keys that want more than the others."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import Admission
from gateway.ranking import Ranking
from protocol.errors import ApiError
from settings.schema import ServerSettings


def limits(limit: int = 1, queue: int = 0, wait_ms: float = 60_000) -> ServerSettings:
    return ServerSettings(max_concurrent_requests=limit, queue_size=queue, queue_timeout_ms=wait_ms)


def admission(limit: int = 1, queue: int = 0, wait_ms: float = 60_000) -> Admission:
    return Admission(limits(limit, queue, wait_ms))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Requests of several keys at one gate; remembers the order in which they got in and who was refused."""

    def __init__(self, places: Admission) -> None:
        self.places = places
        self.entered: list[str] = []
        self.refused: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def comes(self, *names: str) -> None:
        """One request each, `key` or `key:name`, in this order."""
        for name in names:
            self.tasks.append(asyncio.create_task(self._one(name)))
            await settle()

    async def _one(self, name: str) -> None:
        try:
            await self.places.enter(name.partition(":")[0])
        except ApiError as error:
            self.refused.append(name if error.code == "queue_full" else error.code)
        else:
            self.entered.append(name)

    async def leaves(self, *keys: str) -> None:
        for key in keys:
            self.places.leave(key)
            await settle()

    async def goes_home(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_without_a_queue_one_too_many_is_refused_at_once() -> None:
    places = admission(limit=2)
    await places.enter("a")
    await places.enter("a")
    with pytest.raises(ApiError) as caught:
        await places.enter("b")
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "queue_full", 1)
    places.leave("a")
    await places.enter("b")
    assert places.inflight == 2


async def test_requests_of_one_key_get_places_in_the_order_of_coming() -> None:
    crowd = Crowd(admission(queue=3))
    await crowd.comes("a:0", "a:1", "a:2", "a:3")
    assert crowd.places.waiting == 3
    with pytest.raises(ApiError, match="queue of 3"):
        await crowd.places.enter("a")
    await crowd.leaves("a", "a", "a", "a")
    assert crowd.entered == ["a:0", "a:1", "a:2", "a:3"]
    assert (crowd.places.inflight, crowd.places.waiting) == (0, 0)


async def test_a_wait_has_an_end_that_names_its_length() -> None:
    places = admission(queue=1, wait_ms=20)
    await places.enter("a")
    with pytest.raises(ApiError, match="within 20 ms"):
        await places.enter("a")
    assert (places.inflight, places.waiting) == (1, 0)


async def test_who_leaves_the_queue_leaves_no_trace() -> None:
    places = admission(queue=2)
    await places.enter("a")
    first, second = (asyncio.create_task(places.enter("a")) for _ in range(2))
    await settle()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert places.waiting == 1
    places.leave("a")
    await second
    assert (places.inflight, places.waiting) == (1, 0)


async def test_a_place_handed_to_somebody_who_leaves_in_that_moment_goes_on_to_the_next() -> None:
    places = admission(queue=2)
    await places.enter("a")
    first, second = (asyncio.create_task(places.enter(key)) for key in "bc")
    await settle()
    places.leave("a")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert (places.inflight, places.waiting) == (1, 0)


async def test_one_request_behind_500_of_another_key_is_next_but_one() -> None:
    crowd = Crowd(admission(limit=2, queue=1000))
    await crowd.comes(*["greedy"] * 502, "modest")
    await crowd.leaves("greedy")
    assert crowd.entered == ["greedy", "greedy", "modest"]
    await crowd.leaves("greedy")
    assert crowd.entered[3:] == ["greedy"]
    await crowd.goes_home()


async def test_keys_that_wait_get_places_in_turn() -> None:
    crowd = Crowd(admission(limit=3, queue=20))
    await crowd.comes("x", "x", "x", *["a"] * 4, *["b"] * 3, "c")
    await crowd.leaves("x", "x", "x")
    assert crowd.entered[3:] == ["a", "b", "c"]
    await crowd.leaves("c", "a", "b")  # c has nobody left
    assert crowd.entered[6:] == ["a", "b", "a"]
    await crowd.goes_home()


async def test_a_key_whose_answers_are_long_does_not_end_up_with_every_place() -> None:
    crowd = Crowd(admission(limit=4, queue=100))
    await crowd.comes("slow", "fast", *["slow"] * 8, *["fast"] * 8)
    for _ in range(6):
        await crowd.leaves("fast")  # its answers end; those of the other key never do
    held = [name for name in crowd.entered if name == "slow"]
    assert len(held) == 3  # those that came while nobody else wanted a place
    assert crowd.entered.count("fast") == 7
    await crowd.goes_home()


async def test_when_the_queue_is_full_the_key_with_the_largest_share_gives_way_with_its_newest() -> None:
    crowd = Crowd(admission(limit=2, queue=4))
    await crowd.comes("greedy", "greedy", "greedy:1", "greedy:2", "modest:1", "greedy:3")
    await crowd.comes("modest:2")
    assert crowd.refused == ["greedy:3"]
    await crowd.comes("greedy:4")  # it has the largest share: it is refused itself
    assert crowd.refused == ["greedy:3", "greedy:4"]
    await crowd.comes("third:1")
    assert crowd.refused == ["greedy:3", "greedy:4", "greedy:2"]
    assert crowd.places.waiting == 4
    await crowd.comes("third:2")  # greedy has two places and one that waits
    assert crowd.refused[3:] == ["greedy:1"]
    await crowd.comes("third:3")  # of those that wait nobody has more than this key would have
    assert crowd.refused[4:] == ["third:3"]
    await crowd.goes_home()


async def test_who_is_put_out_is_told_why() -> None:
    places = admission(limit=1, queue=1)
    await places.enter("greedy")
    waiting = asyncio.create_task(places.enter("greedy"))
    await settle()
    modest = asyncio.create_task(places.enter("modest"))
    with pytest.raises(ApiError, match="its newest gave way") as caught:
        await waiting
    assert caught.value.retry_after == 1
    places.leave("greedy")
    await modest
    assert (places.inflight, places.waiting) == (1, 0)


async def test_who_is_put_out_and_leaves_in_that_moment_takes_nothing_along() -> None:
    places = admission(limit=1, queue=1)
    await places.enter("greedy")
    waiting = asyncio.create_task(places.enter("greedy"))
    await settle()
    modest = asyncio.create_task(places.enter("modest"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    places.leave("greedy")
    await modest
    places.leave("modest")
    assert (places.inflight, places.waiting, places._held, places._lines) == (0, 0, {}, {})


async def test_more_places_are_given_out_at_once_and_fewer_put_nobody_out() -> None:
    crowd = Crowd(admission(limit=1, queue=9))
    await crowd.comes("a:0", "a:1", "a:2", "b:0")
    crowd.places.resize(limits(limit=3, queue=9))
    await settle()
    assert crowd.entered == ["a:0", "b:0", "a:1"]
    crowd.places.resize(limits(limit=1, queue=0))
    await crowd.comes("c")
    assert crowd.refused == ["c"]
    await crowd.leaves("a", "b")
    assert (crowd.places.inflight, crowd.places.waiting) == (1, 1)
    await crowd.leaves("a")
    assert crowd.entered[3:] == ["a:2"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["come", "leave", "give up"])), max_size=60))
async def test_whatever_happens_places_and_waiting_add_up(events: list[tuple[str, str]]) -> None:
    crowd, source = Crowd(admission(limit=2, queue=3)), random.Random(1)
    for key, what in events:
        if what == "come":
            await crowd.comes(key)
        elif what == "leave" and crowd.places._held:
            await crowd.leaves(source.choice(sorted(crowd.places._held)))
        elif crowd.tasks:
            source.choice(crowd.tasks).cancel()
            await settle()
        assert crowd.places.inflight == sum(crowd.places._held.values()) <= 2
        assert crowd.places.waiting == sum(map(len, crowd.places._lines.values())) <= 3
        assert not crowd.places.waiting or crowd.places.inflight == 2
    await crowd.goes_home()
    for key, held in list(crowd.places._held.items()):
        await crowd.leaves(*[key] * held)
    assert (crowd.places.inflight, crowd.places._held, crowd.places._lines) == (0, {}, {})
    assert not crowd.places._by_held
    assert not crowd.places._by_share


def test_a_ranking_finds_the_lowest_and_does_not_grow_with_its_changes() -> None:
    ranking, scores, source = Ranking(), dict.fromkeys("abcdef", 0), random.Random(2)
    for name in scores:
        ranking.put_last(name, 0)
    assert ranking.lowest() == "a"
    for _ in range(5000):
        name = source.choice("abcdef")
        scores[name] += source.choice((-1, 1))
        ranking.move(name, scores[name])
        assert scores[ranking.lowest()] == min(scores.values())
    assert len(ranking._heap) < 100
    for name in scores:
        ranking.drop(name)
    assert (ranking.lowest(), bool(ranking)) == (None, False)
