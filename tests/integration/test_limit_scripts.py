"""The arithmetic in Redis is that of the window in memory, and what is kept there is bounded."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.limits.script import ENTER, RENEW, SETTLE
from gateway.limits.window import SlidingWindow


def at(text: str) -> str:
    """A script that is told the time: seconds and microseconds come last."""
    return text.replace("redis.call('TIME')", "{ARGV[2], ARGV[3]}")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 90_000), st.booleans(), st.integers(1, 40)), min_size=1, max_size=30))
def test_redis_counts_as_memory_does(redis_running, events) -> None:
    client = redis_running.client()
    client.flushall()
    enter, settle = client.register_script(at(ENTER)), client.register_script(at(SETTLE))
    keys = ["r", "t", "p", "d", "m"]
    requests, tokens, now_ms, days = SlidingWindow(), SlidingWindow(), 5_000_000, 0
    for wait_ms, is_request, amount in events:
        now_ms += wait_ms
        now_ns, moment = now_ms * 1_000_000, (now_ms // 1000, now_ms % 1000 * 1000)
        if not is_request:
            settle(keys, [f"{amount} 1 1 0 - 60 60", *moment])
            tokens.add(now_ns, amount)
            days += amount
            continue
        answer = [int(word) for word in enter(keys, ["3 50 -1 1000000 -1 q 1000", *moment]).split()]
        over, _, used, used_ms, spent, spent_ms, day, _, retry_ms = answer
        if tokens.total(now_ns) >= 50:
            expected = (3, tokens.below_in_ns(now_ns, 50))
        elif requests.total(now_ns) >= 3:
            expected = (2, requests.below_in_ns(now_ns, 3))
        else:
            expected = (0, 0)
            requests.add(now_ns, 1)
        assert (over, retry_ms * 1_000_000) == expected
        assert (used, used_ms * 1_000_000) == (requests.total(now_ns), requests.empty_in_ns(now_ns))
        assert (spent, spent_ms * 1_000_000) == (tokens.total(now_ns), tokens.empty_in_ns(now_ns))
        assert day == days


def test_a_place_of_a_gateway_that_died_is_free_again_after_its_lease(redis_alone) -> None:
    enter = redis_alone.client().register_script(at(ENTER))
    keys = ["r", "t", "p", "d", "m"]

    def over(request: str, second: int) -> int:
        return int(enter(keys, [f"-1 -1 1 -1 -1 {request} 30000", second, 0]).split()[0])

    assert [over("a", 1000), over("b", 1029), over("c", 1031)] == [0, 1, 0]
    renew = redis_alone.client().register_script(at(RENEW))
    renew(["p"], ["30000 c", 1060, 0])
    assert over("d", 1089) == 1
    renew(["p"], ["30000 gone", 1089, 0])  # an ended request's place is not made again
    assert over("e", 1091) == 0


def test_what_is_kept_in_redis_for_a_key_is_bounded_and_runs_out(redis_alone) -> None:
    client = redis_alone.client()
    enter = client.register_script(at(ENTER))
    keys = ["r", "t", "p", "d", "m"]
    for second in range(1000, 1500):
        enter(keys, ["1000000 -1 -1 -1 -1 a 1000", second, 0])
    assert client.hlen("r") <= 61 + 3
    assert 0 < client.ttl("r") <= 62
