"""What the engine is measured against inside torch: transformers' continuous batching, and the bare matrix products.

A child process of `benchmarks.engine_speed`: one JSON object a line on its input, one on its output.

    python -m benchmarks.torch_side generate_batch FOLDER
    python -m benchmarks.torch_side products FOLDER
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from backend_engine.models.packing import PackedLinear, can_pack, pack_linears

KV_PAGES = 128
"""Of 256 tokens; 32 sequences of 200 tokens take 32."""


def generate_batch(folder: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers {prompts, max_tokens} with {tokens, seconds}: from the call to the last token of all."""
    model = _model(folder)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        how = GenerationConfig(max_new_tokens=asked["max_tokens"], do_sample=False, eos_token_id=-1, pad_token_id=0)
        room = ContinuousBatchingConfig(num_blocks=KV_PAGES, max_batch_tokens=2048, allow_block_sharing=False)
        began = time.perf_counter()
        found = model.generate_batch(asked["prompts"], generation_config=how, continuous_batching_config=room)
        seconds = time.perf_counter() - began
        errors = [output.error for output in found.values() if output.error]
        if errors:
            raise SystemExit(f"generate_batch failed: {errors[0]}")
        return {"tokens": sum(len(output.generated_tokens) for output in found.values()), "seconds": seconds}

    return answer


def products(folder: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers {times} with the median ms of all linear layers' products for one row: as torch.mv of the plain weights,
    and by the kernels that the engine uses. Nothing else of a step is in it."""
    model = _model(folder)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = [linear.weight.detach().clone() for linear in linears]
    rows = {weight.shape[1]: torch.randn(1, weight.shape[1]) for weight in weights}
    device = torch.device("cpu")
    packed = []
    if can_pack(torch.float32, device):
        pack_linears(model)
        packed = [module for module in model.modules() if isinstance(module, PackedLinear)]

    def plain() -> None:
        for weight in weights:
            F.linear(rows[weight.shape[1]], weight)

    def reordered() -> None:
        for linear in packed:
            linear(rows[linear.in_features])

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        took: dict[str, list[float]] = {"plain_ms": [], "packed_ms": []}
        with torch.inference_mode():
            for _ in range(asked["times"]):
                for name, run in (("plain_ms", plain), ("packed_ms", reordered)):
                    began = time.perf_counter()
                    run()
                    took[name].append((time.perf_counter() - began) * 1e3)
        return {name: statistics.median(times) for name, times in took.items() if packed or name == "plain_ms"}

    return answer


def _model(folder: Path) -> Any:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def main() -> None:
    """Serves its input's lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    role, folder = sys.argv[1], Path(sys.argv[2])
    answer = {"generate_batch": generate_batch, "products": products}[role](folder)
    print(json.dumps({"threads": torch.get_num_threads()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
