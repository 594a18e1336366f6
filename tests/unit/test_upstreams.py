"""Choosing upstreams: breaker, balance, affinity and the retry budget, on a clock that the test owns."""

import random

import pytest

from gateway.upstreams.balance import AFFINITY_SLACK, Balancer
from gateway.upstreams.breaker import FAILURES_TO_OPEN, MAX_OPEN_SECONDS, Breaker, BreakerState
from gateway.upstreams.retries import BURST, RetryBudget
from gateway.upstreams.router import Route, Target, Upstream
from protocol.errors import ApiError
from tracing.clock import FakeClock


def breaker(clock: FakeClock) -> Breaker:
    return Breaker(clock, random.Random(1))


def open_up(found: Breaker) -> None:
    for _ in range(FAILURES_TO_OPEN):
        found.tried()
        found.failed()


def test_the_third_failure_in_a_row_opens_and_one_success_forgets() -> None:
    found = breaker(FakeClock())
    for _ in range(FAILURES_TO_OPEN - 1):
        found.failed()
    assert found.can_try()
    found.succeeded()
    for _ in range(FAILURES_TO_OPEN - 1):
        found.failed()
    assert found.state is BreakerState.CLOSED
    found.failed()
    assert (found.state, found.can_try()) == (BreakerState.OPEN, False)


def test_half_open_lets_one_request_through_and_its_result_decides() -> None:
    clock = FakeClock()
    found = breaker(clock)
    open_up(found)
    clock.advance_ms(found.opens_in_seconds * 1e3 + 1)
    assert (found.state, found.can_try()) == (BreakerState.HALF_OPEN, True)
    found.tried()
    assert not found.can_try()
    found.succeeded()
    assert (found.state, found.can_try()) == (BreakerState.CLOSED, True)


def test_a_failed_trial_opens_for_longer_up_to_a_limit() -> None:
    clock = FakeClock()
    found = breaker(clock)
    open_up(found)
    lengths = [found.opens_in_seconds]
    for _ in range(8):
        clock.advance_ms(found.opens_in_seconds * 1e3 + 1)
        found.tried()
        found.failed()
        lengths.append(found.opens_in_seconds)
    assert lengths[1] > 1.3 * lengths[0]
    assert max(lengths) <= 1.2 * MAX_OPEN_SECONDS


def test_a_client_that_leaves_during_the_trial_frees_it_for_the_next() -> None:
    clock = FakeClock()
    found = breaker(clock)
    open_up(found)
    clock.advance_ms(found.opens_in_seconds * 1e3 + 1)
    found.tried()
    found.gave_up()
    assert found.can_try()


def test_health_checks_hold_it_open_until_they_pass_and_then_one_trial_decides() -> None:
    found = breaker(FakeClock())
    found.hold_open(True)
    assert (found.state, found.can_try()) == (BreakerState.OPEN, False)
    found.hold_open(False)
    assert (found.state, found.can_try()) == (BreakerState.HALF_OPEN, True)


def targets(*names: str, **fields: object) -> tuple[Target, ...]:
    return tuple(Target(Upstream(name, f"http://{name}/v1"), "m", **fields) for name in names)


@pytest.fixture
def balancer() -> Balancer:
    return Balancer(FakeClock(), random.Random(1))


def names(found: list[Target]) -> list[str]:
    return [target.upstream.name for target in found]


def test_equals_keep_the_order_of_the_configuration(balancer: Balancer) -> None:
    assert names(balancer.order(Route("m", targets("a", "b", "c")))) == ["a", "b", "c"]


def test_the_least_expected_wait_comes_first(balancer: Balancer) -> None:
    route = Route("m", targets("a", "b"))
    a, b = (balancer.of(target.upstream) for target in route.targets)
    a.saw_first_token(0.1)
    b.saw_first_token(0.3)
    assert names(balancer.order(route)) == ["a", "b"]
    a.outstanding = 5
    assert names(balancer.order(route)) == ["b", "a"]


def test_one_that_was_slow_is_tried_again_after_a_while() -> None:
    clock = FakeClock()
    balancer = Balancer(clock, random.Random(1))
    route = Route("m", targets("a", "b"))
    a, b = (balancer.of(target.upstream) for target in route.targets)
    a.saw_first_token(0.8)
    b.saw_first_token(0.1)
    assert names(balancer.order(route)) == ["b", "a"]
    clock.advance_ms(40_000)
    b.saw_first_token(0.1)
    assert names(balancer.order(route)) == ["a", "b"]


def test_a_breaker_that_may_be_tried_gets_its_trial_first() -> None:
    clock = FakeClock()
    balancer = Balancer(clock, random.Random(1))
    route = Route("m", targets("a", priority=1) + targets("b"))
    breaker = balancer.of(route.targets[0].upstream).breaker
    open_up(breaker)
    assert names(balancer.order(route)) == ["b"]
    clock.advance_ms(breaker.opens_in_seconds * 1e3 + 1)
    assert names(balancer.order(route)) == ["a", "b"]
    breaker.tried()
    assert names(balancer.order(route)) == ["b"]


def test_weight_and_priority_are_heeded(balancer: Balancer) -> None:
    heavy = Route("m", targets("a", weight=1) + targets("b", weight=4))
    assert names(balancer.order(heavy)) == ["b", "a"]
    fallback = Route("m", targets("a", priority=1) + targets("b", priority=0))
    balancer.of(fallback.targets[1].upstream).outstanding = 100
    assert names(balancer.order(fallback)) == ["b", "a"]


def test_an_upstream_that_asked_to_be_left_alone_comes_last(balancer: Balancer) -> None:
    route = Route("m", targets("a", "b"))
    balancer.of(route.targets[0].upstream).cool(5)
    assert names(balancer.order(route)) == ["b", "a"]


def test_an_open_breaker_is_passed_over_and_when_all_are_open_the_client_is_told_when(balancer: Balancer) -> None:
    route = Route("m", targets("a", "b"))
    a, b = (balancer.of(target.upstream).breaker for target in route.targets)
    open_up(a)
    assert names(balancer.order(route)) == ["b"]
    open_up(b)
    with pytest.raises(ApiError) as caught:
        balancer.order(route)
    assert (caught.value.status, caught.value.code) == (503, "upstream_unavailable")
    assert caught.value.retry_after is not None
    assert caught.value.retry_after >= 1


def test_failed_checks_alone_refuse_nobody_and_an_answer_overrules_them(balancer: Balancer) -> None:
    route = Route("m", targets("a", "b"))
    a, b = (balancer.of(target.upstream).breaker for target in route.targets)
    a.hold_open(True)
    assert names(balancer.order(route)) == ["b"]
    b.hold_open(True)
    assert names(balancer.order(route)) == ["a", "b"]
    a.tried()
    a.succeeded()
    assert a.state is BreakerState.CLOSED
    assert names(balancer.order(route)) == ["a"]
    open_up(a)
    open_up(b)
    with pytest.raises(ApiError):
        balancer.order(route)


def test_a_prefix_prefers_one_target_and_leaves_it_when_it_is_overloaded(balancer: Balancer) -> None:
    route = Route("m", targets("a", "b", "c"), affinity=True)
    firsts = {prefix: names(balancer.order(route, b"%d" % prefix))[0] for prefix in range(60)}
    assert set(firsts.values()) == {"a", "b", "c"}
    assert all(names(balancer.order(route, b"%d" % prefix))[0] == first for prefix, first in firsts.items())
    less = Route("m", targets("a", "b"), affinity=True)
    moved = [p for p, first in firsts.items() if names(balancer.order(less, b"%d" % p))[0] != first]
    assert all(firsts[prefix] == "c" for prefix in moved)
    prefix, first = next(iter(firsts.items()))
    balancer.of(next(t.upstream for t in route.targets if t.upstream.name == first)).outstanding = AFFINITY_SLACK + 1
    assert names(balancer.order(route, b"%d" % prefix))[0] != first


def test_retries_are_a_share_of_requests() -> None:
    budget = RetryBudget()
    spent = sum(budget.spend() for _ in range(100))
    assert spent == BURST
    for _ in range(100):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == BURST
    for _ in range(11):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == 2
