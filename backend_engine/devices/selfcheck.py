"""Before a model serves: our packed, paged forward must agree with the model's own.

The architectures that pass every structural check may still differ in what attention means to them. So a few random
tokens run both ways once, with a prompt in two chunks and a decode step; a model that disagrees is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.packed_step import Model, PackedStep, Piece, logits_of
from backend_engine.models.attention import IMPLEMENTATION
from backend_engine.models.errors import OTHER_ENGINE, ModelError
from backend_engine.models.lean import RunnableStep
from backend_engine.models.loading import LoadedModel

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Most |ours - own| / |own| of a row of logits. A wrong mask, scale or position gives about 1.
In float64, too, models compute norms, softmax and angles in float32."""

StepOf = Callable[[Sequence[Piece], torch.Tensor, torch.Tensor, KvCache], RunnableStep]
"""Makes a step of pieces, their tokens [S, longest], block tables [S, pages] and a cache."""

_LENGTHS = (21, 10)
_PAGE_SIZE = 16


class _Piece(msgspec.Struct, frozen=True):
    slot: int
    start: int
    count: int
    samples: bool


class SelfCheck:
    """Takes the model's own logits when it is made: then its weights may be laid out anew, and `compare` checks that
    too."""

    def __init__(self, loaded: LoadedModel, device: torch.device) -> None:
        self._loaded = loaded
        self._device = device
        generator = torch.Generator().manual_seed(0)
        shape = (len(_LENGTHS), max(_LENGTHS))
        self._tokens = torch.randint(0, loaded.vocab_size, shape, generator=generator).to(device)
        self._is_too_short = loaded.max_model_len < max(_LENGTHS)
        with torch.inference_mode():
            self._own = None if self._is_too_short else self._own_logits()

    def compare_alone(self, model: Model) -> float | None:
        """As `compare`, with a small cache of its own; None where sequences are too short for it."""
        if self._own is None:
            return None
        loaded = self._loaded
        pages = -(-max(_LENGTHS) // _PAGE_SIZE)
        cache = KvCache(
            loaded.layers, len(_LENGTHS) * pages, _PAGE_SIZE, pages * _PAGE_SIZE, loaded.dtype, self._device
        )
        return self.compare(model, cache)

    def compare(self, model: Model, cache: KvCache, step_of: StepOf = PackedStep.of) -> float:
        """Returns the largest relative difference; raises ModelError when it is above the tolerance.

        Writes pages of `cache`, which must have no owner yet.
        """
        loaded, tokens = self._loaded, self._tokens
        pages = -(-max(_LENGTHS) // cache.page_size)
        block_tables = torch.arange(pages * len(_LENGTHS), device=self._device).view(len(_LENGTHS), pages)
        if self._own is None or block_tables.numel() > len(cache.keys[0]):
            return 0.0  # a cache of a few tokens (tests) has no room for the check
        first = [_Piece(0, 0, 13, False), _Piece(1, 0, _LENGTHS[1] - 1, False)]
        second = [_Piece(1, _LENGTHS[1] - 1, 1, True), _Piece(0, 13, _LENGTHS[0] - 13, True)]
        with torch.inference_mode():
            logits_of(model, step_of(first, tokens, block_tables, cache))
            ours = logits_of(model, step_of(second, tokens, block_tables, cache))
        difference = float(((ours - self._own).norm(dim=-1) / self._own.norm(dim=-1)).max())
        if not difference <= TOLERANCE[loaded.dtype]:
            raise ModelError(
                f"model {loaded.name!r} ({type(loaded.model).__name__}): our forward differs from transformers' own by "
                f"{difference:.2g} (at most {TOLERANCE[loaded.dtype]:g} is rounding), so its attention is not "
                f"supported: {OTHER_ENGINE}"
            )
        return difference

    def _own_logits(self) -> torch.Tensor:
        """In the order of the second step's pieces."""
        return torch.stack(
            [_own_logits(self._loaded, row) for row in (self._tokens[1, : _LENGTHS[1]], self._tokens[0])]
        )


def _own_logits(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    loaded.model.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = loaded.model(input_ids=tokens[None].long(), use_cache=False, logits_to_keep=1).logits
        return logits[0, -1]
    finally:
        loaded.model.set_attn_implementation(IMPLEMENTATION)
