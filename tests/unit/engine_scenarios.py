"""Random scenarios for the loop: arrivals, lengths, stops, beginnings that are alike, aborts, memory that runs out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from engine_support import IN_ORDER, ORDERS, BreakingDevice, Driver, settings_of

from backend_engine.core.messages import Output
from backend_engine.core.step import Device, Flight, OutOfDeviceMemory, StepPlan, StepResult
from backend_engine.devices.opening import open_device
from tracing.clock import Clock, SystemClock

PAGE_SIZE = 4
MAX_MODEL_LEN = 48
PAGES = 12
TINY_VOCAB = 61
LLAMA, WINDOWED = "llama", "mistral with a sliding window"


class Ask(msgspec.Struct, frozen=True):
    """One request of a scenario."""

    name: str
    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any]
    at_turn: int
    abort_at_turn: int | None


def asks_of(chance: random.Random, vocab: list[int]) -> list[Ask]:
    """A few requests, several of which begin alike."""
    beginnings = [[chance.choice(vocab) for _ in range(chance.choice((4, 9, 17)))] for _ in range(2)]
    asks = []
    for number in range(chance.randint(3, 9)):
        prompt = [chance.choice(vocab) for _ in range(chance.randint(1, 12))]
        if chance.random() < 0.6:
            prompt = chance.choice(beginnings) + prompt
        sampling: dict[str, Any] = {"temperature": 0.0}
        if chance.random() < 0.5:
            sampling = {"temperature": chance.choice((0.5, 1.3)), "seed": chance.getrandbits(40)}
            sampling |= chance.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.3}))
        if chance.random() < 0.6:
            sampling["stop_token_ids"] = tuple(chance.sample(vocab, 4))
        arrives = chance.randint(0, 12)
        leaves = arrives + chance.randint(0, 8) if chance.random() < 0.3 else None
        asks.append(Ask(f"r{number}", prompt, chance.randint(1, 30), sampling, arrives, leaves))
    return asks


def settings_with(chance: random.Random, order: dict[str, bool]) -> Any:
    slots = chance.choice((1, 3, 5, 5))
    return settings_of(
        engine={
            "device": "simulated",
            "page_size": PAGE_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "cpu_kv_cache_gib": PAGES * PAGE_SIZE * 2048 / 2**30,
            "gpu_memory_utilization": 1,
        },
        scheduler={
            "max_num_seqs": slots,
            "max_num_batched_tokens": chance.choice((slots, slots + 3, 64)),
            "enable_chunked_prefill": chance.random() < 0.8,
            "enable_prefix_caching": chance.random() < 0.8,
        },
        token_interval=order | {"slot_reuse": chance.random() < 0.6},
    )


def play(driver: Driver, asks: list[Ask]) -> None:
    """Submits and aborts by turns of the loop, and runs until the core is idle."""
    for turn in range(25):
        for ask in asks:
            if ask.at_turn == turn:
                driver.submit(ask.name, ask.prompt, ask.max_tokens, **ask.sampling)
            if ask.abort_at_turn == turn:
                driver.abort(ask.name)
        driver.turn()
    driver.run()


def alone(device: Device, clock: Clock, ask: Ask) -> list[int]:
    """The answer to one request that nobody disturbs."""
    settings = settings_of(scheduler={"max_num_seqs": 5}, token_interval=IN_ORDER)
    driver = Driver(device, settings, clock)
    driver.submit(ask.name, ask.prompt, ask.max_tokens, **ask.sampling)
    driver.run()
    return driver.tokens(ask.name)


def check(driver: Driver, asks: list[Ask], expected: dict[str, list[int]]) -> int:
    """Every answer is the expected one, or for an aborted request its beginning; every interval adds up. Returns the
    preemptions."""
    preemptions = 0
    for ask in asks:
        finished = driver.finished(ask.name)
        got, whole = driver.tokens(ask.name), expected[ask.name]
        assert got == (whole[: len(got)] if finished.reason == "abort" else whole), ask
        assert finished.reason in {"stop", "length", "abort"}
        outputs = driver.outputs[ask.name]
        assert finished.preemptions == len(finished.preempted_at_ns)
        assert (finished.preempted_ns > 0) <= (finished.preemptions > 0)
        preemptions += finished.preemptions
        if finished.reason != "abort":
            assert finished.output_tokens == len(whole)
            assert finished.steps == len(whole) - 1
            check_intervals(outputs)
    driver.close()
    return preemptions


def check_intervals(outputs: list[Output]) -> None:
    first, last = outputs[0].scheduled, outputs[-1].finished
    assert first is not None
    assert last is not None
    assert first.scheduled_ns <= first.prefill_end_ns == outputs[0].step_end_ns
    assert last.last_token_ns == outputs[-1].step_end_ns
    ends = [output.step_end_ns for output in outputs]
    assert ends == sorted(ends)


class CheckedDevice:
    """Holds what the slot kernels say of a row's end against what the host finds."""

    def __init__(self, inner: Device) -> None:
        self.info = inner.info
        self._inner = inner

    def launch(self, plan: StepPlan) -> Flight:
        return CheckedFlight(plan, self._inner.launch(plan))


class RowKeeper:
    """Keeps each row's block table as a device would, and notes every chunk that runs on a row written for another: its
    keys and values would go into pages that may be somebody's."""

    def __init__(self, inner: Device) -> None:
        self.info = inner.info
        self.strangers: list[str] = []
        self._inner = inner
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def launch(self, plan: StepPlan) -> Flight:
        for opening in plan.opened:
            self._rows[opening.slot] = opening.tokens[: opening.prompt_tokens], list(opening.pages)
        for page in plan.pages:
            self._rows[page.slot][1][page.at :] = [page.page]
        for chunk in plan.chunks:
            request, pages = chunk.request, -(-(chunk.start + chunk.count) // PAGE_SIZE)
            wanted = request.tokens[: request.prompt_tokens], request.pages[:pages]
            prompt, table = self._rows.get(chunk.slot, ([], []))
            if (prompt, table[:pages]) != wanted:
                self.strangers.append(f"{request.id} in row {chunk.slot}: {prompt} {table}, not {wanted}")
        return self._inner.launch(plan)


class CheckedFlight:
    def __init__(self, plan: StepPlan, inner: Flight) -> None:
        self._plan = plan
        self._inner = inner

    def wait(self) -> StepResult:
        result = self._inner.wait()
        assert result.ends is not None
        sampling = [chunk for chunk in self._plan.chunks if chunk.samples]
        for chunk, token, has_ended in zip(sampling, result.tokens, result.ends, strict=True):
            request = chunk.request
            if not (request.is_finished or request.has_ended) and chunk.epoch == request.epoch:
                is_stop = token in request.sampling.stop_token_ids
                assert has_ended == (is_stop or chunk.start + chunk.count + 1 >= request.most_tokens)
        return result


def short_of_memory(inner: Device, seed: int) -> Device:
    """Now and then a step runs out of memory: at its launch, or (as on CUDA) when it should have ended. Only steps that
    could be smaller do, so no request has to go."""
    chance = random.Random(seed)

    def breaks(plan: StepPlan, _: int) -> Exception | None:
        is_short = len(plan.chunks) > 1 and chance.random() < 0.08
        return OutOfDeviceMemory("no memory") if is_short else None

    return BreakingDevice(inner, breaks, at_launch=seed % 2 == 0)


def open_tiny_device(folder: Path, kind: str = LLAMA) -> Device:
    """One layer, so that a step takes no time worth speaking of; its cache is sized like the simulated one's."""
    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.6,
    }
    config = (
        transformers.LlamaConfig(**shape) if kind == LLAMA else transformers.MistralConfig(**shape, sliding_window=7)
    )
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    bytes_per_token = 2 * 8 * 4
    settings = settings_of(
        engine={
            "model": str(folder),
            "device": "cpu",
            "page_size": PAGE_SIZE,
            "cpu_kv_cache_gib": PAGES * PAGE_SIZE * bytes_per_token / 2**30,
            "gpu_memory_utilization": 1,
        },
        scheduler={"max_num_seqs": 5},
    )
    device = open_device(settings, SystemClock())
    assert device.info.kv_pages == PAGES
    return device


class Happened(msgspec.Struct):
    """What the scenarios are about, counted."""

    preemptions: int = 0
    hits: int = 0
    ooms: int = 0
    aborts: int = 0

    def add(self, driver: Driver, preemptions: int) -> None:
        """One scenario."""
        gauges = driver.said[-1].gauges
        self.preemptions += preemptions
        self.hits += gauges.prefix_hits_total
        self.ooms += gauges.ooms_total
        self.aborts += sum(
            output.finished is not None and output.finished.reason == "abort"
            for outputs in driver.outputs.values()
            for output in outputs
        )


def compare_orders(device: Device, seeds: range, oracle_device: Device | None = None) -> Happened:
    """Plays each scenario in one of the other orders, and holds every answer against the loop in order with nobody
    aborted, on the same device or on another."""
    happened, clock, vocab = Happened(), SystemClock(), list(range(3, TINY_VOCAB))
    for seed in seeds:
        chance = random.Random(1000 + seed)
        settings = settings_with(chance, list(ORDERS.values())[1 + seed % 3])
        asks = asks_of(chance, vocab)
        oracle = Driver(oracle_device or device, settings_with(random.Random(1000 + seed), IN_ORDER), clock)
        play(oracle, [msgspec.structs.replace(ask, abort_at_turn=None) for ask in asks])
        keeper = RowKeeper(CheckedDevice(device))
        driver = Driver(short_of_memory(keeper, seed), settings, clock)
        play(driver, asks)
        assert keeper.strangers == []
        happened.add(driver, check(driver, asks, {ask.name: oracle.tokens(ask.name) for ask in asks}))
    return happened
