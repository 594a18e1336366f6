"""Where the time of a step on a CPU goes: torch's profiler over the engine core, without HTTP, by kinds of operators.

For batches of 1, 8 and 32 sequences with prompts of 135 tokens, in a process of its own each: the steps that prefill
them, and decode steps. `ms` is a step measured without the profiler; the shares are the profiler's, which itself makes
small operators look dearer than they are. `python` is what passes between operators: the model's code, the scheduler.

    python -m benchmarks.engine_profile            one Markdown table, about a minute
    python -m benchmarks.engine_profile --json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import Progress

from backend_engine.supervise import ALLOCATOR
from benchmarks.gateway import ROOT

BATCHES = (1, 8, 32)
PROMPT_TOKENS, DECODE_STEPS = 135, 8
KINDS = {
    "linear layers": ("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm", "aten::linear"),
    "attention": (
        *("aten::sparse_sampled_addmm", "aten::_embedding_bag_forward_only", "aten::_softmax", "aten::index_select"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::bmm"),
    ),
    "keys and values written": ("aten::index_copy_",),
    "norms, rotary, activations": (
        *("aten::mul", "aten::add", "aten::pow", "aten::mean", "aten::rsqrt", "aten::silu", "aten::neg", "aten::cat"),
        *("aten::sum", "aten::div_", "aten::sigmoid", "aten::gelu", "aten::linalg_vector_norm", "aten::rsqrt_"),
        *("aten::addcmul", "aten::addcmul_", "aten::mul_", "aten::add_", "aten::roll"),
    ),
}
"""The rest are views, allocations, copies and the slot kernels."""


def profiled(batch: int) -> dict[str, Any]:
    """In this process: prefill and decode of one batch."""
    from torch.profiler import ProfilerActivity, profile

    from backend_engine.core.forward import InlineForward
    from backend_engine.core.loop import EngineCore
    from backend_engine.core.messages import Sampling, Submit
    from backend_engine.devices.opening import open_device
    from settings.schema import Settings
    from tracing.clock import SystemClock

    chance, clock = random.Random(1), SystemClock()
    settings = Settings.model_validate(
        {
            "state_dir": "/nowhere",
            "engine": {"device": "cpu", "dtype": "float32"},
            "scheduler": {"max_num_seqs": 32, "queue_warn_ms": 1e9},
            "token_interval": {"async_scheduling": False, "overlap_token_interval": False},
        }
    )
    core = EngineCore(InlineForward(open_device(settings, clock)), settings, clock, draw_seed=lambda: 0)

    def begin(name: str) -> None:
        for number in range(batch):
            prompt = [chance.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
            how = Sampling(max_tokens=2 * DECODE_STEPS + 8, temperature=0.0)
            core.take(Submit(f"{name}{number}", prompt, how, clock.mono_ns()))

    def turns(until_decoding: bool) -> list[float]:
        """Turns while prompts are computed, or DECODE_STEPS of them; ms each."""
        took: list[float] = []
        while until_decoding or len(took) < DECODE_STEPS:
            began = time.perf_counter()
            said = core.turn()
            took.append((time.perf_counter() - began) * 1e3)
            if until_decoding and said is not None and any(step.tokens == step.batch for step in said.steps):
                return took[:-1]
        return took

    def finish() -> None:
        while core.wait_ns() is not None:
            core.turn()

    begin("first")
    turns(until_decoding=True)  # pages of the cache and the allocator's are touched once
    finish()
    begin("plain")
    prefill_ms, decode_ms = sum(turns(until_decoding=True)), statistics.median(turns(until_decoding=False))
    finish()
    begin("profiled")
    with profile(activities=[ProfilerActivity.CPU]) as of_prefill:
        began = time.perf_counter()
        turns(until_decoding=True)
        prefill_seconds = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CPU]) as of_decode:
        began = time.perf_counter()
        turns(until_decoding=False)
        decode_seconds = time.perf_counter() - began
    return {
        "prefill": {"ms": round(prefill_ms, 1), "shares": shares(of_prefill.key_averages(), prefill_seconds)},
        "decode": {"ms": round(decode_ms, 1), "shares": shares(of_decode.key_averages(), decode_seconds)},
    }


def shares(averages: Any, seconds: float) -> dict[str, float]:
    """By kind, of all the time."""
    own = {entry.key: entry.self_cpu_time_total / 1e6 for entry in averages}
    found = {kind: sum(own.get(name, 0.0) for name in names) for kind, names in KINDS.items()}
    operators = sum(spent for name, spent in own.items() if "::" in name)
    found["other operators"] = operators - sum(found.values())
    found["python"] = max(0.0, seconds - operators)
    return {kind: round(spent / seconds, 3) for kind, spent in found.items()}


def main() -> None:
    """A process for each batch, so that none meets what another left in the caches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.batch:
        print(json.dumps(profiled(args.batch)))
        return
    threads = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    found: dict[int, dict[str, Any]] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for batch in progress.track(BATCHES, description="profiling"):
            command = [sys.executable, "-m", "benchmarks.engine_profile", "--batch", str(batch)]
            environ = ALLOCATOR | os.environ | {"OMP_NUM_THREADS": threads}  # as the core is started
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ, check=True)
            found[batch] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"threads": int(threads), "batches": found}, indent=1)) if args.json else show(found)


def show(found: dict[int, dict[str, Any]]) -> None:
    """A Markdown table."""
    kinds = list(next(iter(found.values()))["decode"]["shares"])
    print(f"| step | ms | {' | '.join(kinds)} |\n|{'---|' * (len(kinds) + 2)}")
    for phase in ("prefill", "decode"):
        for batch, told in found.items():
            row = told[phase]
            what = f"prefill, {batch} x {PROMPT_TOKENS}" if phase == "prefill" else f"decode, batch of {batch}"
            print(f"| {what} | {row['ms']:.0f} | {' | '.join(f'{share:.1%}' for share in row['shares'].values())} |")


if __name__ == "__main__":
    main()
