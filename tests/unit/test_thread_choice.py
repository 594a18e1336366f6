"""Steps run with the number of threads that was faster for steps of their size, and changes are noticed."""

from __future__ import annotations

from collections.abc import Callable

from backend_engine.devices.thread_choice import PROBE_EVERY, ThreadChoice


class Steps:
    """Runs steps whose time depends on the number of threads."""

    def __init__(self, most: int = 2) -> None:
        self.used: list[int] = []
        self.choice = ThreadChoice(most, self.used.append)

    def run(self, count: int, ns_of: Callable[[int], int], tokens: int = 4, *, decodes: bool = True) -> list[int]:
        threads = []
        for _ in range(count):
            threads.append(self.choice.begin(tokens, decodes=decodes))
            self.choice.took(tokens, ns_of(threads[-1]))
        return threads


def quiet(threads: int) -> int:
    return 3000 // threads


def crowded(threads: int) -> int:
    return 3000 if threads == 1 else 9000


def test_alone_all_threads_run_but_for_a_rare_step_that_looks_whether_that_is_still_right() -> None:
    threads = Steps().run(4 * PROBE_EVERY, quiet)
    assert threads[:4] == [2, 2, 1, 2]
    assert threads[4:].count(1) == 4


def test_in_company_one_fewer_runs_and_when_it_has_left_all_do_again() -> None:
    steps = Steps()
    steps.run(50, quiet)
    assert steps.run(20, crowded)[3:] == [1] * 17  # noticed within a few steps
    back = steps.run(20 * PROBE_EVERY, quiet)
    assert back[-10:].count(2) >= 9


def test_sizes_and_kinds_of_steps_are_judged_apart() -> None:
    steps = Steps()
    steps.run(10, quiet, tokens=2000, decodes=False)
    assert steps.run(10, crowded)[2:] == [1] * 8
    assert steps.run(5, quiet, tokens=2000, decodes=False)[1:] == [2] * 4
    assert steps.run(10, quiet, tokens=64)[3:] == [2] * 7


def test_a_prompts_step_runs_with_one_fewer_only_where_decode_steps_found_company() -> None:
    steps = Steps()
    steps.run(10, quiet)
    assert steps.run(3 * PROBE_EVERY, quiet, tokens=2000, decodes=False) == [2] * 3 * PROBE_EVERY
    steps.run(20, crowded)
    assert steps.run(10, crowded, tokens=2000, decodes=False)[-6:] == [1] * 6
    steps.run(20 * PROBE_EVERY, quiet)
    assert steps.run(20 * PROBE_EVERY, quiet, tokens=2000, decodes=False)[-10:] == [2] * 10


def test_the_first_step_of_a_size_is_not_judged() -> None:
    """It makes kernels: however long it takes, all threads are tried again before one fewer is."""
    steps = Steps()
    assert steps.run(1, lambda _: 10**9) == [2]
    assert steps.run(4, quiet) == [2, 1, 2, 2]


def test_where_one_thread_is_all_there_is_nothing_is_chosen_or_set() -> None:
    steps = Steps(most=1)
    assert steps.run(3 * PROBE_EVERY, crowded) == [1] * 3 * PROBE_EVERY
    assert steps.used == []


def test_an_empty_step_is_no_evidence() -> None:
    steps = Steps()
    assert steps.choice.begin(0, decodes=True) == 2
    steps.choice.took(0, 100)
    assert steps.run(3, quiet) == [2, 2, 1]


def test_neither_is_one_that_broke_off() -> None:
    steps = Steps()
    steps.run(3, quiet)
    steps.choice.begin(4, decodes=True)  # and never took
    steps.choice.begin(0, decodes=True)
    steps.choice.took(0, 100)
    assert steps.run(1, quiet) == [2]
