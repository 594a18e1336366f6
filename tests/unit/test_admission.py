"""Admission: places, the queue for them, and everybody who leaves it early."""

import asyncio

import pytest

from gateway.admission import Admission
from protocol.errors import ApiError
from settings.schema import ServerSettings


def admission(limit: int = 1, queue: int = 0, wait_ms: float = 60_000) -> Admission:
    return Admission(ServerSettings(max_concurrent_requests=limit, queue_size=queue, queue_timeout_ms=wait_ms))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_a_queue_one_too_many_is_refused_at_once() -> None:
    places = admission(limit=2)
    await places.enter()
    await places.enter()
    with pytest.raises(ApiError) as caught:
        await places.enter()
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "queue_full", 1)
    places.leave()
    await places.enter()
    assert places.inflight == 2


async def test_who_waits_gets_the_place_in_the_order_of_coming() -> None:
    places = admission(queue=3)
    await places.enter()
    order: list[int] = []

    async def one(number: int) -> None:
        await places.enter()
        order.append(number)
        places.leave()

    waiting = [asyncio.create_task(one(number)) for number in range(3)]
    await settle()
    assert places.waiting == 3
    with pytest.raises(ApiError, match="queue of 3"):
        await places.enter()
    places.leave()
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]
    assert (places.inflight, places.waiting) == (0, 0)


async def test_a_wait_has_an_end_that_names_its_length() -> None:
    places = admission(queue=1, wait_ms=20)
    await places.enter()
    with pytest.raises(ApiError, match="within 20 ms"):
        await places.enter()
    assert (places.inflight, places.waiting) == (1, 0)


async def test_who_leaves_the_queue_leaves_no_trace() -> None:
    places = admission(queue=2)
    await places.enter()
    first, second = (asyncio.create_task(places.enter()) for _ in range(2))
    await settle()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert places.waiting == 1
    places.leave()
    await second
    assert (places.inflight, places.waiting) == (1, 0)


async def test_a_place_handed_to_somebody_who_leaves_in_that_moment_goes_on_to_the_next() -> None:
    places = admission(queue=2)
    await places.enter()
    first, second = (asyncio.create_task(places.enter()) for _ in range(2))
    await settle()
    places.leave()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert (places.inflight, places.waiting) == (1, 0)
