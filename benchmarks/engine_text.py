"""What making text costs the engine's processes, with it in the frontend and in processes of its own.

CPU time of each process for each step of the simulated device (35 ms forward), at 32 and 256 streams, in turns: what
else the machine does hardly changes it. With --model, what each process takes to be ready to serve a real model.

    python -m benchmarks.engine_text --json
    python -m benchmarks.engine_text --model smollm2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.gateway import ROOT, free_port

FORWARD_MS = 35
CASES: tuple[tuple[int, dict[str, Any]], ...] = ((32, {}), (256, {}), (256, {"stop": ["~~~a", "~~~b", "~~~c"]}))
"""Streams, and what they ask for."""
WARM_SECONDS, MEASURED_SECONDS = 3.0, 6.0
READY_SECONDS = 120.0
PROCESSES = {
    "engine-alone": "frontend",
    "core.process": "core",
    "text.tokenize_process": "tokenizer",
    "text.detokenize_process": "detokenizer",
}
MIB = 2**20


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--model", help="measure what each process takes to be ready for this model, and nothing else")
    args = parser.parse_args()
    rows = ready(args.model) if args.model else per_step()
    print(json.dumps(rows, indent=1)) if args.json else show(rows)


def per_step() -> list[dict[str, Any]]:
    """A row for each case and each of both ways."""
    return [
        {"streams": streams, **asked, "text_processes": own, **measured(streams, asked, own)}
        for streams, asked in CASES
        for own in (False, True)
    ]


def measured(streams: int, asked: dict[str, Any], own: bool) -> dict[str, Any]:
    """CPU ms of each process for each step, while `streams` answers run."""
    variables = {
        "ENGINE__DEVICE": "simulated",
        "SIMULATED__FORWARD_MS": str(FORWARD_MS),
        "SCHEDULER__MAX_NUM_SEQS": str(streams),
        "SCHEDULER__MAX_NUM_BATCHED_TOKENS": "8192",
        "TOKEN_INTERVAL__DETOKENIZER_ASYNC": str(own).lower(),
    }
    with engine(variables) as (process, port):
        return asyncio.run(under_load(process, port, streams, asked))


async def under_load(process: psutil.Process, port: int, streams: int, asked: dict[str, Any]) -> dict[str, Any]:
    readers = [asyncio.create_task(read_stream(port, asked)) for _ in range(streams)]
    await asyncio.sleep(WARM_SECONDS)
    before, first = cpu_ms(process), await asyncio.to_thread(steps_so_far, port)
    await asyncio.sleep(MEASURED_SECONDS)
    after, last = cpu_ms(process), await asyncio.to_thread(steps_so_far, port)
    if any(reader.done() for reader in readers):
        raise SystemExit("an answer ended while it was measured")
    for reader in readers:
        reader.cancel()
    steps = last - first
    spent = {name: round((after[name] - before[name]) / steps, 2) for name in after}
    return {"steps": steps, "cpu_ms_per_step": spent}


async def read_stream(port: int, asked: dict[str, Any]) -> None:
    """Asks for a long answer and reads it without looking at it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wanted = {"model": "simulated", "prompt": "hi there" * 4, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    body = json.dumps(wanted | asked).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    try:
        while await reader.read(65536):
            pass
    finally:
        writer.close()


def ready(model: str) -> list[dict[str, Any]]:
    """CPU seconds and memory of each process when the engine has just become ready, both ways."""
    rows = []
    for own in (False, True):
        variables = {
            "ENGINE__DEVICE": "cpu",
            "ENGINE__MODEL": model,
            "TOKEN_INTERVAL__DETOKENIZER_ASYNC": str(own).lower(),
        }
        began = time.monotonic()
        with engine(variables) as (process, _):
            seconds = time.monotonic() - began
            spent = {name: round(ms / 1e3, 2) for name, ms in cpu_ms(process).items()}
            memory = {name_of(one): one.memory_info().rss // MIB for one in all_of(process)}
            rows.append({"text_processes": own, "ready_s": round(seconds, 1), "cpu_s": spent, "rss_mib": memory})
    return rows


def all_of(process: psutil.Process) -> list[psutil.Process]:
    """The command, which only supervises, and all that it started."""
    return [process, *process.children(recursive=True)]


def name_of(process: psutil.Process) -> str:
    """What the engine's pages call it."""
    line = " ".join(process.cmdline())
    return next((name for word, name in PROCESSES.items() if word in line), "supervisor")


def cpu_ms(process: psutil.Process) -> dict[str, float]:
    """User and system time of each process so far, and the frontend's system time alone."""
    times = {name_of(one): one.cpu_times() for one in all_of(process)}
    spent = {name: 1e3 * (found.user + found.system) for name, found in times.items()}
    return spent | {"frontend, in the system": 1e3 * times["frontend"].system}


def steps_so_far(port: int) -> float:
    """By the engine's own count."""
    lines, name = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines(), "tokenline_engine_batch_size_count"
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@contextmanager
def engine(variables: dict[str, str]) -> Iterator[tuple[psutil.Process, int]]:
    """`tokenline engine`, ready to serve."""
    with tempfile.TemporaryDirectory(prefix="bench-text-") as state:
        port = free_port()
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("TOKENLINE_", "OTEL_"))}
        environ |= {f"TOKENLINE_{name}": value for name, value in variables.items()}
        environ |= {"TOKENLINE_STATE_DIR": state, "TOKENLINE_SERVER__PORT": str(port), "HF_HUB_OFFLINE": "1"}
        command = [str(Path(sys.executable).with_name("tokenline")), "engine"]
        process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            until_ready(process, port)
            yield psutil.Process(process.pid), port
        finally:
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)  # the answers that run are not waited for
            process.wait(30)


def until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit("the engine did not become ready; its log is above")


def show(rows: list[dict[str, Any]]) -> None:
    """As a table."""
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
