"""One row of the gap table: `python -m backend_engine.measuring.gap --mode asynchronous` prints JSON lines.

The engine core runs over the simulated device, without HTTP: a full batch, requests that end and others that take
their place, and always some that wait. A line `{"done": n, "of": m}` tells of progress, and the last line is the row.
The slot kernels run on real tensors, and what they take is charged to the device's step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from backend_engine.core.forward import start_forward
from backend_engine.core.messages import Outputs, Sampling, Step, Submit
from backend_engine.measuring.host_times import SCHEDULE, HostTimes, TimedCore
from backend_engine.measuring.text_side import TextInAProcess, TextInTheLoop, TextSide
from settings.schema import Settings
from tracing.clock import SystemClock

if TYPE_CHECKING:
    from backend_engine.devices.simulated import SimulatedDevice

PROMPT_TOKENS = 128
LEAST_TOKENS, MOST_TOKENS = 64, 191
SPARE = 16
"""Requests that wait beside those that run."""
WARM_STEPS = 12
PROGRESS_EVERY = 10
_MAX_MODEL_LEN = 512


class Mode(msgspec.Struct, frozen=True):
    """What is switched on."""

    has_text_process: bool
    slot_reuse: bool
    is_asynchronous: bool


MODES = {
    "synchronous": Mode(has_text_process=False, slot_reuse=False, is_asynchronous=False),
    "text_processes": Mode(has_text_process=True, slot_reuse=False, is_asynchronous=False),
    "static_slots": Mode(has_text_process=True, slot_reuse=True, is_asynchronous=False),
    "asynchronous": Mode(has_text_process=True, slot_reuse=True, is_asynchronous=True),
}
"""Each adds to the one before."""


class Row(msgspec.Struct, frozen=True):
    """One mode's figures."""

    mode: str
    gap_p50_ms: float
    gap_p95_ms: float
    busy_ratio: float
    tps: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    host_ms: dict[str, float]
    """Mean host time per step by part, whether or not the device waited for it."""
    slot_kernel_ms: float
    """Mean per step, charged to the device."""
    text_process_ms: float
    """Mean time per step in which text was made beside the loop."""
    mean_batch: float
    steps: int
    simulated: bool = True


def settings_for(mode: Mode, batch: int, forward_ms: float) -> Settings:
    """The engine's settings of a mode."""
    return Settings.model_validate(
        {
            "state_dir": "/nonexistent",
            "engine": {"device": "simulated", "max_model_len": _MAX_MODEL_LEN},
            "simulated": {"forward_ms": forward_ms, "prefill_token_us": 0},
            "scheduler": {
                "max_num_seqs": batch,
                "max_num_batched_tokens": max(2048, 16 * batch),
                "queue_warn_ms": 3_600_000,
            },
            "token_interval": {
                "async_scheduling": mode.is_asynchronous,
                "overlap_token_interval": mode.is_asynchronous,
                "slot_reuse": mode.slot_reuse,
                "detokenizer_async": mode.has_text_process,
            },
        }
    )


def open_simulated(settings: Settings, clock: SystemClock) -> SimulatedDevice:
    """The simulated device with slot state on the CPU."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported
    import torch

    from backend_engine.devices.simulated import VOCAB_SIZE, SimulatedDevice, sleeper
    from backend_engine.devices.slot_rows import SlotRows

    slots, size = settings.scheduler.max_num_seqs, settings.engine.page_size
    rows = SlotRows(slots, _MAX_MODEL_LEN, size, VOCAB_SIZE, torch.device("cpu"))
    return SimulatedDevice(settings, clock, sleeper(clock), rows)


class Bench:
    """A core under load, and what it said."""

    def __init__(self, core: TimedCore, text: TextSide, clock: SystemClock, batch: int) -> None:
        self._core = core
        self._text = text
        self._clock = clock
        self._batch = batch
        self._numbers = itertools.count()
        self._alive = 0
        self.steps: list[Step] = []
        self.token_ends_ns: dict[str, list[int]] = defaultdict(list)

    def run(self, steps: int) -> Iterator[int]:
        """Runs that many steps; yields how many are done."""
        self.steps.clear()
        self.token_ends_ns.clear()
        self._core.times.reset()
        while len(self.steps) < steps:
            began_ns = self._clock.mono_ns()
            self._top_up()
            self._core.times.add(SCHEDULE, self._clock.mono_ns() - began_ns)
            time.sleep(self._core.slack_ns() / 1e9)
            said = self._core.turn()
            if said is not None:
                self._text.deliver(said)
                self._note(said)
                yield len(self.steps)

    def _top_up(self) -> None:
        while self._alive < self._batch + SPARE:
            number = next(self._numbers)
            prompt = [(number * 31 + at * 7) % 251 for at in range(PROMPT_TOKENS)]
            length = LEAST_TOKENS + number * 37 % (MOST_TOKENS - LEAST_TOKENS + 1)
            name = f"request-{number}"
            self._text.open(name)
            self._core.take(Submit(name, prompt, Sampling(max_tokens=length), self._clock.mono_ns()))
            self._alive += 1

    def _note(self, said: Outputs) -> None:
        self.steps += said.steps
        for output in said.outputs:
            self._alive -= output.finished is not None
            self.token_ends_ns[output.request_id].append(output.step_end_ns)


def measure(name: str, batch: int, forward_ms: float, steps: int) -> Iterator[dict[str, Any]]:
    """Progress, and the row as the last item."""
    mode = MODES[name]
    settings, clock, times = settings_for(mode, batch, forward_ms), SystemClock(), HostTimes()
    seeds = itertools.count()
    has_thread = settings.token_interval.async_scheduling
    forward = start_forward(partial(open_simulated, settings, clock), has_thread=has_thread)
    core = TimedCore(forward, settings, clock, draw_seed=lambda: next(seeds))
    core.times = times
    with tempfile.TemporaryDirectory(prefix="tokenline-") as folder:
        text: TextSide = (TextInAProcess if mode.has_text_process else TextInTheLoop)(Path(folder), times)
        bench = Bench(core, text, clock, batch)
        gc.collect()
        gc.freeze()  # as the engine's core does once it is loaded
        for _ in bench.run(WARM_STEPS + PROMPT_TOKENS // 16):
            pass
        for done in bench.run(steps):
            if done % PROGRESS_EVERY == 0:
                yield {"done": done, "of": steps}
        host_ms = times.per_step_ms(len(bench.steps))
        text_process_ms = text.close()
    core.close()
    yield msgspec.to_builtins(row_of(name, bench.steps, bench.token_ends_ns, host_ms, text_process_ms))


def row_of(
    name: str,
    steps: Sequence[Step],
    token_ends_ns: dict[str, list[int]],
    host_ms: dict[str, float],
    text_process_ms: float,
) -> Row:
    """The figures of these steps."""
    gaps_ms = [(step.gap_ns or 0) / 1e6 for step in steps]
    busy_ns = sum(step.forward_ns for step in steps)
    elapsed_ns = busy_ns + sum(step.gap_ns or 0 for step in steps)
    tpots_ms = [(ends[-1] - ends[0]) / (len(ends) - 1) / 1e6 for ends in token_ends_ns.values() if len(ends) > 8]
    return Row(
        mode=name,
        gap_p50_ms=statistics.median(gaps_ms),
        gap_p95_ms=percentile(gaps_ms, 0.95),
        busy_ratio=busy_ns / elapsed_ns,
        tps=sum(len(ends) for ends in token_ends_ns.values()) / elapsed_ns * 1e9,
        tpot_p50_ms=statistics.median(tpots_ms) if tpots_ms else 0.0,
        tpot_p99_ms=percentile(tpots_ms, 0.99) if tpots_ms else 0.0,
        host_ms=host_ms,
        slot_kernel_ms=sum(step.slot_kernel_ns for step in steps) / len(steps) / 1e6,
        text_process_ms=text_process_ms,
        mean_batch=sum(step.batch for step in steps) / len(steps),
        steps=len(steps),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def main() -> int:
    """Measures one mode."""
    parser = argparse.ArgumentParser(prog="python -m backend_engine.measuring.gap", description=__doc__)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--batch", type=int, default=256, help="sequences in a step")
    parser.add_argument("--forward-ms", type=float, default=35.0, help="length of a simulated forward")
    parser.add_argument("--steps", type=int, default=120, help="how many are measured")
    arguments = parser.parse_args()
    try:
        for line in measure(arguments.mode, arguments.batch, arguments.forward_ms, arguments.steps):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    except ValueError as error:  # what the settings or the scheduler refuse
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
