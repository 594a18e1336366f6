"""The demo model through the whole line on the GPU: prints one JSON line of what it did. Exit code 1: it went wrong."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from line_rig import Line, line

READY_SECONDS = 110
TOKENS = 64
PROMPT = "Tell a long story about a lighthouse keeper and the sea. " * 10
CONCURRENCY = (1, 8, 32)
PAGED = {
    "TOKENLINE_ENGINE__DTYPE": "bfloat16",
    "TOKENLINE_ENGINE__PAGE_SIZE": "256",
    "TOKENLINE_ENGINE__CUDA_GRAPHS": "true",
}
"""What attention over the paged cache in place wants."""


def ask(up: Line, tag: int) -> tuple[float, float, int]:
    """(seconds to the first token, between tokens, tokens) of one streamed answer."""
    body = {
        "model": up.model, "stream": True, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": f"{tag}. {PROMPT}"}],
    }  # fmt: skip
    began = time.perf_counter()
    first = last = 0.0
    tokens = 0
    with up.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for row in answer.iter_lines():
            if not row.startswith("data: {"):
                continue
            event = json.loads(row[6:])
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                last = time.perf_counter()
                first = first or last
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    assert tokens > 1, "an answer without tokens"
    return first - began, (last - first) / (tokens - 1), tokens


def stage(up: Line, concurrency: int, tag: int) -> dict[str, Any]:
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        found = list(pool.map(lambda at: ask(up, tag + at), range(2 * concurrency)))
    seconds = time.perf_counter() - began
    return {
        "concurrency": concurrency,
        "tps": sum(tokens for _, _, tokens in found) / seconds,
        "ttft_p50_ms": 1e3 * statistics.median(ttft for ttft, _, _ in found),
        "tpot_p50_ms": 1e3 * statistics.median(tpot for _, tpot, _ in found),
    }


def main() -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        line(Path(folder), "--device", "cuda", ready_s=READY_SECONDS, **PAGED) as up,
    ):
        answer = up.chat(
            messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=24, temperature=0
        )
        text = answer.json()["choices"][0]["message"]["content"]
        assert "Paris" in text, text
        told = up.why(answer.headers["x-request-id"])
        assert any('device="cuda"' in row for row in up.metrics().splitlines()), "the engine is not on the GPU"
        stages = [stage(up, concurrency, 1000 * concurrency) for concurrency in CONCURRENCY]
        page = up.metrics().splitlines()
        socket = Path(up.environ["TOKENLINE_STATE_DIR"]) / "run" / "engine.sock"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as client:
            advice = client.get("http://engine/advice").json()
    return {
        "answer": text,
        "stages_ms": told["stages"],
        "load": stages,
        "gpu": [row for row in page if row.startswith("tokenline_gpu_")],
        "engine": [row for row in page if row.startswith(("tokenline_engine_info", "tokenline_engine_busy"))],
        "advice": advice,
    }


if __name__ == "__main__":
    print(json.dumps(main()))
