"""A model on a torch device. Written and tested on a CPU; CUDA runs through the same code, unverified so far."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec
import torch

from backend_engine.core.logits import log_probabilities
from backend_engine.core.messages import MAX_LOGPROBS, Ready
from backend_engine.core.sampler import sample
from backend_engine.core.step import NO_TOKEN, Chunk, StepPlan, StepResult
from backend_engine.devices.fitting import memory_of, pages_that_fit, start_errors_named
from backend_engine.devices.forwards import open_forward
from backend_engine.devices.kv_cache import KvCache
from backend_engine.devices.memory import memory_errors_named
from backend_engine.devices.model_choice import choose_model
from backend_engine.devices.results import Arrival, OnHost, PinnedBuffers, Sampled, told_logprobs
from backend_engine.devices.selfcheck import SelfCheck
from backend_engine.devices.sizing import GIB
from backend_engine.devices.slot_rows import SlotRows
from backend_engine.devices.step_sampling import StepSampling, step_sampling
from backend_engine.devices.thread_choice import ThreadChoice
from backend_engine.devices.timeline import CudaTimeline, HostMarks, Marks
from backend_engine.kernels.slot_tensors import GOES_ON
from backend_engine.models.loading import LoadedModel, load_model
from settings.schema import Settings
from tracing.clock import Clock

log = logging.getLogger(__name__)

_T = TypeVar("_T")

FEATURES = ("min_p", "penalties", "logit_bias", "logprobs", "min_tokens", "masks")


def open_torch_device(settings: Settings, clock: Clock) -> TorchDevice:
    """Loads the model that the settings name. Errors (ValueError) name the cause and the fix."""
    asked = settings.engine.device
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            'engine.device = "cuda": torch finds no CUDA device here; set it to "cpu" or "auto", or install the driver '
            "and a CUDA build of torch"
        )
    kind = "cuda" if torch.cuda.is_available() and asked in ("auto", "cuda") else "cpu"
    device = torch.device(kind)
    with start_errors_named(settings):
        return TorchDevice(load_model(settings, device), settings, clock, device)


class _Launched(msgspec.Struct, frozen=True):
    plan: StepPlan
    chunks: list[Chunk]
    """Those of the plan that were computed."""
    marks: Marks
    arrival: Arrival
    how: StepSampling | None
    prepare_ns: int


class TorchFlight:
    """A step whose results are on the host, or on their way there."""

    def __init__(self, device: TorchDevice, launched: _Launched) -> None:
        self._device = device
        self._launched = launched

    def wait(self) -> StepResult:
        """Blocks until the results are there."""
        launched = self._launched
        try:
            with memory_errors_named(launched.plan):
                sampled = launched.arrival.wait()
            times = launched.marks.times()
        finally:
            self._device.landed()
        asked = [chunk.request.sampling.logprobs for chunk in launched.chunks if chunk.samples]
        logprobs = told_logprobs(sampled, launched.how, [count for count in asked if count is not None])
        ends = (sampled.ends != GOES_ON).tolist()
        return StepResult(
            tokens=self._of_all(sampled.tokens.tolist(), NO_TOKEN),
            start_ns=times.start_ns,
            end_ns=times.end_ns,
            slot_kernel_ns=times.slot_kernel_ns,
            prepare_ns=launched.prepare_ns,
            logprobs=None if logprobs is None else self._of_all(logprobs, None),
            ends=self._of_all(ends, True),
        )

    def _of_all(self, found: list[_T], of_ended: _T) -> list[_T]:
        """For every chunk of the plan that samples, also those that had ended and were not computed."""
        plan, computed = self._launched.plan, self._launched.chunks
        if len(computed) == len(plan.chunks):
            return found
        alive, rest = {id(chunk) for chunk in computed}, iter(found)
        return [next(rest) if id(chunk) in alive else of_ended for chunk in plan.chunks if chunk.samples]


class TorchDevice:
    """Owns the weights, the KV cache and the slots' rows. `launch` is called by one thread, `wait` of a flight by one
    other or the same."""

    def __init__(self, loaded: LoadedModel, settings: Settings, clock: Clock, device: torch.device) -> None:
        self._clock = clock
        self._device = device
        self._end_ns = 0
        self._launches = self._landings = 0
        page_size, slots = settings.engine.page_size, settings.scheduler.max_num_seqs
        check = SelfCheck(loaded, device)
        model, weight_bytes = choose_model(loaded, check, device)
        # before the cache is sized: on CUDA the rows' memory is taken at once, and the cache gets what is left
        # one row more than can be owned: what recorded decode steps are filled up with
        self._rows = SlotRows(slots + 1, loaded.max_model_len, page_size, loaded.vocab_size, device)
        memory = memory_of(device)
        pages = pages_that_fit(settings, weight_bytes, loaded.kv_bytes_per_token, loaded.max_model_len, memory)
        self._cache = KvCache(loaded.layers, pages, page_size, loaded.max_model_len, loaded.dtype, device)
        self._no_logits = torch.empty(0, loaded.vocab_size, device=device)
        is_cuda = device.type == "cuda"
        self._threads = ThreadChoice(1 if is_cuda else torch.get_num_threads(), torch.set_num_threads)
        self._timeline = CudaTimeline(clock) if is_cuda else None
        self._buffers = PinnedBuffers(device, slots, MAX_LOGPROBS) if is_cuda else None
        self._forward, difference = open_forward(
            loaded, model, self._rows, self._cache, check, spare_row=slots, uses_graphs=settings.engine.cuda_graphs
        )
        log.info(
            "%s on %s in %s: %.2f GiB of weights, %d KV pages of %d tokens (%.2f GiB), up to %d tokens a sequence; "
            "%d slots (%.2f GiB at most); differs from transformers' own forward by %.1e",
            loaded.name,
            device.type,
            str(loaded.dtype).removeprefix("torch."),
            weight_bytes / GIB,
            pages,
            page_size,
            pages * page_size * loaded.kv_bytes_per_token / GIB,
            loaded.max_model_len,
            slots,
            self._rows.most_bytes / GIB,
            difference,
        )
        self.info = Ready(
            device=device.type,
            dtype=str(loaded.dtype).removeprefix("torch."),
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            weight_bytes=weight_bytes,
            kv_pages=pages,
            page_size=page_size,
            eos_token_ids=loaded.eos_token_ids,
            features=FEATURES,
        )

    def launch(self, plan: StepPlan) -> TorchFlight:
        """Runs forward, sampling and slot kernels. On a CPU that is all done when this returns; on CUDA it is queued,
        and so is the copy of what was sampled."""
        launched_ns = self._clock.mono_ns()
        marks = self._marks(launched_ns)
        with memory_errors_named(plan), torch.inference_mode():
            self._rows.open(plan.opened)
            self._rows.add_pages(plan.pages)
            self._rows.set_masks(plan.masks)
            chunks = self._alive(plan)
            logits_of_step = self._forward.prepare(chunks) if chunks else None
            prepare_ns = self._clock.mono_ns() - launched_ns
            tokens = sum(chunk.count for chunk in chunks)
            self._threads.begin(tokens, decodes=all(chunk.decodes for chunk in chunks))
            logits = self._no_logits if logits_of_step is None else logits_of_step()
            marks.forward_done()
            sampled, how = self._sample([chunk for chunk in chunks if chunk.samples], logits)
            marks.done()
            self._threads.took(tokens, self._clock.mono_ns() - launched_ns - prepare_ns)
            arrival: Arrival = OnHost(sampled) if self._buffers is None else self._buffers.bring(sampled)
        if isinstance(marks, HostMarks):
            self._end_ns = marks.end_ns
        self._launches += 1
        return TorchFlight(self, _Launched(plan, chunks, marks, arrival, how, prepare_ns))

    def landed(self) -> None:
        """A flight was waited for."""
        self._landings += 1

    def _alive(self, plan: StepPlan) -> list[Chunk]:
        """What is computed of a plan. On a CPU the step before has ended when this one is launched, so it is known who
        ended with it, though the host has not read it yet; CUDA computes those too, and keeps nothing of them."""
        if self._device.type == "cuda":
            return list(plan.chunks)
        is_done = self._rows.state.is_done.tolist()
        return [chunk for chunk in plan.chunks if not (chunk.decodes and is_done[chunk.slot])]

    def _sample(self, chunks: list[Chunk], logits: torch.Tensor) -> tuple[Sampled, StepSampling | None]:
        slots = self._rows.slot_ids(chunks)
        how = step_sampling(self._rows, chunks, slots)
        if how is None:
            tokens = sample(logits, None)
            return Sampled(tokens, self._rows.advance(slots, tokens), None), None
        tokens = sample(logits, how.random, how.adjusted)
        told = None
        if how.told_rows is not None:
            told = log_probabilities(logits, how.told_rows, tokens, how.told_most)
        return Sampled(tokens, self._rows.advance(slots, tokens), told), how

    def _marks(self, launched_ns: int) -> Marks:
        if self._timeline is None:
            return HostMarks(self._clock, max(launched_ns, self._end_ns))
        return self._timeline.begin(is_idle=self._launches == self._landings)
