"""Tokens per second of the engine, end to end, beside its peers: all in one run, in turns.

Prompts of 135 random tokens, 64 tokens out, greedy, float32, 1, 8 and 32 requests at once. Tokenline's engine and
vLLM's CPU build (--vllm) are asked over HTTP with streaming; transformers' `generate_batch` (continuous batching) is
called in a process of its own, without HTTP. Each runs with the threads it chooses; who is not measured is stopped
(SIGSTOP). Rounds go in turns, and the best of each counts, since what else the machine does only ever slows.

Beside a batch of one stands what its matrix-vector products take alone, with the engine's number of threads.

    python -m benchmarks.engine_speed --json                   some ten minutes on two cores
    python -m benchmarks.engine_speed --quick                  1 and 8 requests, 16 tokens out: under a minute
    python -m benchmarks.engine_speed --vllm /path/to/vllm     with `vllm serve` of a CPU build
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from contextlib import ExitStack
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from backend_engine.models.resolve import resolve_model
from benchmarks.engine_peers import Child, Engine, Ran, child, cpu_seconds, halt, resume, tokenline, vllm

PROMPT_TOKENS = 135
TOKEN_IDS = (1000, 40_000)
"""Random prompts are of these: ordinary words of every vocabulary that is large enough."""
FLOOR_TIMES = 15
TARGETS = {1: 1.0, 8: 1.0, 32: 1.15}
"""Times the tokens per second of vLLM's CPU build, else of `generate_batch`."""
MOST_TIMES_FLOOR = 2.0


def main() -> None:
    """Runs the rounds and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--quick", action="store_true", help="1 and 8 requests, 16 tokens out, once: under a minute")
    parser.add_argument("--model", default="smollm2", help="as in engine.model (default: smollm2)")
    parser.add_argument("--vllm", metavar="BINARY", help="measure this `vllm` as well")
    parser.add_argument("--no-generate-batch", action="store_true", help="leave transformers out")
    parser.add_argument("--rounds", type=int, help="default: 3")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended too
    levels, max_tokens = ([1, 8], 16) if args.quick else ([1, 8, 32], 64)
    rounds = args.rounds or (1 if args.quick else 3)
    folder = str(resolve_model(args.model).folder)
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        starting = progress.add_task("starting the engines", total=None)
        engines: dict[str, Engine] = {"tokenline": stack.enter_context(tokenline(args.model))}
        if not args.no_generate_batch:
            engines["generate_batch"] = stack.enter_context(child("generate_batch", folder))
        if args.vllm:
            engines["vllm"] = stack.enter_context(vllm(args.vllm, folder))
        floor = stack.enter_context(child("products", folder, threads))
        progress.remove_task(starting)
        for each in (*engines.values(), floor):
            halt(each.process)
        runs, floors = measure(engines, floor, levels, max_tokens, rounds, progress)
    result = summary(runs, floors, levels) | {
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": max_tokens,
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "model": args.model,
    }
    print(json.dumps(result, indent=1)) if args.json else show(result)


def measure(
    engines: dict[str, Engine], floor: Child, levels: list[int], max_tokens: int, rounds: int, progress: Progress
) -> tuple[dict[str, dict[int, list[Ran]]], list[dict[str, float]]]:
    """Every engine at every level, in turns; a short batch warms each up first."""
    chance = random.Random(1)
    runs: dict[str, dict[int, list[Ran]]] = {name: {level: [] for level in levels} for name in engines}
    floors: list[dict[str, float]] = []
    cells = [(None, 1)] + [(round_, level) for round_ in range(rounds) for level in levels]
    task = progress.add_task("measuring", total=len(cells) * len(engines))
    for round_, level in cells:
        for name, engine in engines.items():
            progress.update(task, description=f"{name}, {level} at once" if round_ is not None else f"{name}, warming")
            resume(engine.process)
            if round_ is None:
                engine.run(prompts_of(chance, 2), 4)
            else:
                spent = cpu_seconds(engine.process)
                ran = engine.run(prompts_of(chance, level), max_tokens)
                spent = cpu_seconds(engine.process) - spent
                runs[name][level].append(msgspec.structs.replace(ran, cpu_seconds=spent))
            halt(engine.process)
            progress.advance(task)
        if level == 1:
            resume(floor.process)
            floors.append(floor.ask(times=FLOOR_TIMES))
            halt(floor.process)
    return runs, floors


def prompts_of(chance: random.Random, count: int) -> list[list[int]]:
    """Prompts that no prefix cache knows."""
    return [[chance.randrange(*TOKEN_IDS) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def summary(runs: dict[str, dict[int, list[Ran]]], floors: list[dict[str, float]], levels: list[int]) -> dict[str, Any]:
    """The best round of each, what Tokenline is of each peer, and whether the targets are met."""
    best = {
        name: {level: min(found, key=lambda ran: ran.seconds) for level, found in by_level.items()}
        for name, by_level in runs.items()
    }
    tps = {name: {level: ran.tokens / ran.seconds for level, ran in found.items()} for name, found in best.items()}
    ratios = {
        name: {level: tps["tokenline"][level] / tps[name][level] for level in levels}
        for name in tps
        if name != "tokenline"
    }
    per_cpu = {
        name: {level: max(ran.tokens / ran.cpu_seconds for ran in found) for level, found in by_level.items()}
        for name, by_level in runs.items()
    }
    against = "vllm" if "vllm" in ratios else "generate_batch"
    floor = {name: min(found[name] for found in floors) for name in floors[0]}
    paces = [ran.tpot_ms for ran in runs["tokenline"][1] if ran.tpot_ms is not None]
    times_floor = min(paces) / min(floor.values())
    return {
        "tps": rounded(tps, 1),
        "ttft_ms": rounded({n: {k: r.ttft_ms for k, r in f.items() if r.ttft_ms} for n, f in best.items()}, 1),
        "tpot_ms": rounded({n: {k: r.tpot_ms for k, r in f.items() if r.tpot_ms} for n, f in best.items()}, 1),
        "times_peer": rounded(ratios, 2),
        "tokens_per_cpu_second": rounded(per_cpu, 1),
        "decode_step_ms": round(min(paces), 1),
        "products_ms": {name: round(value, 1) for name, value in floor.items()},
        "times_products": round(times_floor, 2),
        "targets_met": {
            f"{level}_at_once": ratios[against][level] >= TARGETS[level] for level in levels if against in ratios
        }
        | {"decode_step": times_floor <= MOST_TIMES_FLOOR},
        "against": against if against in ratios else None,
    }


def rounded(table: dict[str, dict[int, float]], digits: int) -> dict[str, dict[str, float]]:
    """For JSON."""
    return {name: {str(key): round(value, digits) for key, value in row.items()} for name, row in table.items()}


def show(result: dict[str, Any]) -> None:
    """For people."""
    table = Table(
        title=f"tokens/s, prompts of {PROMPT_TOKENS} tokens, {result['output_tokens']} out, best of {result['rounds']}"
    )
    table.add_column("at once", justify="right")
    for name in result["tps"]:
        table.add_column(name, justify="right")
    for name in result["times_peer"]:
        table.add_column(f"times {name}", justify="right")
    for level in result["tps"]["tokenline"]:
        cells = [f"{row[level]:.1f}" for row in result["tps"].values()]
        cells += [f"{row[level]:.2f}" for row in result["times_peer"].values()]
        table.add_row(level, *cells)
    console = Console()
    console.print(table)
    for name, row in result["tokens_per_cpu_second"].items():
        console.print(f"{name}, tokens per CPU second: " + ", ".join(f"{level}: {row[level]:.1f}" for level in row))
    products = ", ".join(f"{name.removesuffix('_ms')} {value} ms" for name, value in result["products_ms"].items())
    console.print(
        f"A token of one request takes {result['decode_step_ms']} ms; the model's matrix-vector products alone "
        f"{products}: {result['times_products']} times the faster."
    )
    missed = [name for name, met in result["targets_met"].items() if not met]
    console.print(f"Targets missed: {', '.join(missed)}" if missed else "All targets are met.")


if __name__ == "__main__":
    main()
