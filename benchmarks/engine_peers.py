"""Engines that `benchmarks.engine_speed` measures: started once, asked in turn, stopped while others are."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import httpx
import msgspec
import psutil

from benchmarks.gateway import ROOT, free_port

MODEL_NAME = "m"
START_SECONDS = 1200.0
"""vLLM compiles the model before it serves, which takes minutes on two cores."""


class Ran(msgspec.Struct, frozen=True):
    """One batch of requests."""

    tokens: int
    seconds: float
    """From the first request sent to the last token of all."""
    ttft_ms: float | None = None
    """Median."""
    tpot_ms: float | None = None
    """Median over the requests of (last token - first) / (tokens - 1)."""
    cpu_seconds: float = 0.0
    """Of the engine's processes together: what other programs slow does not count in it."""


class Engine(Protocol):
    """Something that continues prompts."""

    process: subprocess.Popen[Any]

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Ran:
        """Continues all prompts at once."""


class HttpEngine:
    """An OpenAI-compatible server; requests are streamed, greedy, by token ids."""

    def __init__(self, process: subprocess.Popen[Any], port: int) -> None:
        self.process = process
        self._url = f"http://127.0.0.1:{port}/v1/completions"

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Ran:
        return asyncio.run(self._run(prompts, max_tokens))

    async def _run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Ran:
        connector, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=1200)
        async with aiohttp.ClientSession(connector=connector, timeout=patience) as session:
            began = time.perf_counter()
            told = await asyncio.gather(*(self._ask(session, list(prompt), max_tokens) for prompt in prompts))
            seconds = time.perf_counter() - began
        firsts = sorted((first - began) * 1e3 for first, _, _ in told)
        paces = sorted((last - first) * 1e3 / (count - 1) for first, last, count in told)
        return Ran(sum(count for _, _, count in told), seconds, firsts[len(told) // 2], paces[len(told) // 2])

    async def _ask(
        self, session: aiohttp.ClientSession, prompt: list[int], max_tokens: int
    ) -> tuple[float, float, int]:
        """First event with text, last event with text, tokens by the server's own count."""
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first = last = 0.0
        count = 0
        async with session.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"{self._url} answered {answer.status}: {(await answer.text())[:500]}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("error"):
                    raise SystemExit(f"{self._url} broke off: {event['error']}")
                if event.get("choices"):
                    last = time.perf_counter()
                    first = first or last
                if event.get("usage"):
                    count = event["usage"]["completion_tokens"]
        if count != max_tokens:
            raise SystemExit(f"{self._url} made {count} tokens where {max_tokens} were asked for")
        return first, last, count


class Child:
    """A child process of `benchmarks.torch_side`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.threads: int = self._read()["threads"]

    def ask(self, **asked: Any) -> dict[str, Any]:
        """One line there and one back."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._read()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Ran:
        """For `generate_batch`."""
        told = self.ask(prompts=[list(prompt) for prompt in prompts], max_tokens=max_tokens)
        return Ran(told["tokens"], told["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.process.args[1:4])} ended; its error is above")  # type: ignore[index]
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def tokenline(model: str) -> Iterator[HttpEngine]:
    """`tokenline engine` as a user starts it, with the settings that it comes with."""
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as state:
        port = free_port()
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLINE_")}
        environ |= {
            "TOKENLINE_STATE_DIR": state,
            "TOKENLINE_SERVER__PORT": str(port),
            "TOKENLINE_SERVER__OPS_PORT": str(free_port()),
            "TOKENLINE_ENGINE__MODEL": model,
            "TOKENLINE_ENGINE__SERVED_NAME": MODEL_NAME,
            "TOKENLINE_ENGINE__DEVICE": "cpu",
            "TOKENLINE_ENGINE__DTYPE": "float32",
        }
        command = [str(Path(sys.executable).with_name("tokenline")), "engine"]
        with _process(command, Path(state) / "log", env=environ) as process:
            _await_health(process, port, Path(state) / "log")
            yield HttpEngine(process, port)


@contextmanager
def vllm(binary: str, folder: str) -> Iterator[HttpEngine]:
    """`vllm serve` of a CPU build, in float32, with what it chooses itself."""
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as state:
        port, log = free_port(), Path(state) / "log"
        command = [binary, "serve", folder, "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32"]
        command += ["--port", str(port), "--served-model-name", MODEL_NAME]
        with _process(command, log, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2"}) as process:
            _await_health(process, port, log)
            yield HttpEngine(process, port)


@contextmanager
def child(role: str, folder: str, threads: int | None = None) -> Iterator[Child]:
    """A part of `benchmarks.torch_side`; `threads` None: as many as torch takes by itself."""
    environ = dict(os.environ) if threads is None else os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.torch_side", role, folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ)
    try:
        yield Child(process)
    finally:
        _end(process)


@contextmanager
def _process(command: list[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written, env=env)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    resume(process)
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


def _await_health(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended before it served:\n{log.read_text()[-3000:]}")
        with suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"{process.args} did not serve within {START_SECONDS:.0f} s:\n{log.read_text()[-3000:]}")


def cpu_seconds(process: subprocess.Popen[Any]) -> float:
    """User and system time of a process and its children so far."""
    parent = psutil.Process(process.pid)
    return sum(sum(each.cpu_times()[:2]) for each in [parent, *parent.children(recursive=True)])


def halt(process: subprocess.Popen[Any]) -> None:
    """Stops a process and its children, so that they take nothing from the one that is measured."""
    _signal(process, signal.SIGSTOP)


def resume(process: subprocess.Popen[Any]) -> None:
    """The reverse."""
    _signal(process, signal.SIGCONT)


def _signal(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for each in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
