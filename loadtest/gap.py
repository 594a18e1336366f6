"""The gap table: what stands between two forwards, and how it goes away. Each row is measured in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MODES = ("synchronous", "text_processes", "static_slots", "asynchronous")
"""Each adds to the one before."""
_MODULE = "backend_engine.measuring.gap"
_END_SECONDS = 10

Progress = Callable[[str, float], None]
"""Told the mode and the share of it that is done, 0 to 1."""


class GapFailed(RuntimeError):
    """A row could not be measured; says why."""


def gap_table(*, batch: int, forward_ms: float, steps: int, progress: Progress) -> list[dict[str, Any]]:
    """A row for each mode: mode, gap_p50_ms, gap_p95_ms, busy_ratio, tps, tpot_p50_ms, tpot_p99_ms, host_ms by part,
    slot_kernel_ms, text_process_ms, mean_batch, steps, simulated. Raises GapFailed."""
    return [_row(mode, batch, forward_ms, steps, progress) for mode in MODES]


def _row(mode: str, batch: int, forward_ms: float, steps: int, progress: Progress) -> dict[str, Any]:
    progress(mode, 0.0)
    row: dict[str, Any] | None = None
    command = [sys.executable, "-m", _MODULE, "--mode", mode, "--batch", str(batch)]
    with _running([*command, "--forward-ms", str(forward_ms), "--steps", str(steps)]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            if "mode" in said:
                row = said
            else:
                progress(mode, said["done"] / said["of"])
        _, errors = process.communicate()
    if process.returncode or row is None:
        last = errors.strip().splitlines()[-1:] or ["it said nothing"]
        raise GapFailed(f"mode {mode} could not be measured: {last[0]}")
    progress(mode, 1.0)
    return row


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Ends the process however the block is left."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
