"""What a request may change in the logits, what it may be told of them, and that the device does it row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import ORDERS, VOCAB, Driver, prompts, settings_of, write_tiny_model

from backend_engine.core.logits import AdjustedRows, adjust, log_probabilities
from backend_engine.core.messages import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, Mask
from backend_engine.core.sampler import SamplingRows, sample
from backend_engine.core.step import Device
from backend_engine.devices.opening import open_device
from tracing.clock import SystemClock

PROMPT = prompts([7], seed=4)[0]


# -- the functions ---------------------------------------------------------------------------------------------------


def test_penalties_are_those_that_openai_and_transformers_describe() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, -1.0]])
    changed = adjust(
        logits,
        AdjustedRows(
            rows=torch.tensor([0]),
            counts=torch.tensor([[3, 0, 0, 1, 0]], dtype=torch.int32),
            prompt_holds=torch.tensor([[False, True, False, False, False]]),
            repetition=torch.tensor([2.0]),
            presence=torch.tensor([0.25]),
            frequency=torch.tensor([0.125]),
        ),
    )
    expected = [2.0 / 2 - 0.25 - 3 * 0.125, -2.0 * 2, 1.0, 0.5 / 2 - 0.25 - 0.125, -1.0]
    assert changed[0].tolist() == pytest.approx(expected)
    assert logits[0, 0] == 2.0  # the given ones are what log probabilities are told of


def test_masks_bans_and_bias_touch_their_own_rows_alone() -> None:
    logits = torch.zeros(3, 40)
    allowed = torch.tensor([[-1, -1], [0b1010, 1 << 7]], dtype=torch.int32)
    changed = adjust(
        logits,
        AdjustedRows(
            rows=torch.tensor([2, 0]),
            allowed=allowed,
            banned=torch.tensor([[5, 39, -1], [-1, -1, -1]]),
            bias_ids=torch.tensor([[3, 0], [1, 0]]),
            bias_values=torch.tensor([[4.0, 0.0], [-1.5, 0.0]]),
        ),
    )
    assert changed[1].tolist() == [0.0] * 40
    assert [token for token in range(40) if changed[0, token] > -math.inf] == [1, 3, 39]
    assert changed[0, 1] == -1.5
    assert [token for token in range(40) if changed[2, token] == -math.inf] == [5, 39]
    assert changed[2, 3] == 4.0
    assert changed[2, 0] == 0.0


def test_min_p_rules_out_what_is_less_likely_than_its_share_of_the_likeliest() -> None:
    probabilities = torch.tensor([0.5, 0.26, 0.15, 0.06, 0.03])
    draws = 4000
    tokens = sample(
        probabilities.log().repeat(draws, 1),
        SamplingRows(
            rows=torch.arange(draws),
            temperature=torch.ones(draws),
            top_k=torch.zeros(draws, dtype=torch.int64),
            top_p=torch.ones(draws),
            seed=torch.arange(draws),
            position=torch.zeros(draws, dtype=torch.int64),
            cuts=False,
            min_p=torch.tensor([0.25]).repeat(draws),
        ),
    )
    assert set(tokens.tolist()) == {0, 1, 2}


def test_log_probabilities_are_those_of_the_models_own_distribution() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([3, 9, 0, 29])
    told = log_probabilities(logits, torch.tensor([1, 3]), tokens, 4)
    own = logits.log_softmax(-1)
    assert told.sampled.tolist() == pytest.approx([own[1, 9].item(), own[3, 29].item()])
    for at, row in enumerate((1, 3)):
        best = own[row].topk(4)
        assert told.top_ids[at].tolist() == best.indices.tolist()
        assert told.top_logprobs[at].tolist() == pytest.approx(best.values.tolist())


# -- through the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, "llama with grouped queries")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = settings_of(
        engine={"model": str(folder), "device": "cpu", "page_size": 4}, scheduler={"max_num_seqs": 6}
    )
    yield open_device(settings, SystemClock())
    torch.set_num_threads(threads)


def driver_of(device: Device, order: str = "pipelined", **switches: bool) -> Driver:
    settings = settings_of(scheduler={"max_num_seqs": 6}, token_interval=ORDERS[order] | switches)
    return Driver(device, settings, SystemClock())


def answer(device: Device, max_tokens: int = 12, order: str = "pipelined", **sampling: Any) -> list[int]:
    driver = driver_of(device, order)
    driver.submit("a", PROMPT, max_tokens, **sampling)
    driver.run()
    driver.close()
    return driver.tokens("a")


def test_a_bias_forces_and_forbids_tokens(device: Device) -> None:
    assert answer(device, logit_bias=((41, 100.0),)) == [41] * 12
    plain = answer(device)
    assert plain[0] not in answer(device, logit_bias=tuple((token, -100.0) for token in set(plain)))


def test_stop_ids_are_ruled_out_until_the_answer_is_long_enough(device: Device) -> None:
    stop = answer(device)[2]
    assert len(answer(device, stop_token_ids=(stop,))) == 3
    tokens = answer(device, stop_token_ids=(stop,), min_tokens=6)
    assert stop not in tokens[:6]
    biased = answer(device, stop_token_ids=(stop,), min_tokens=6, logit_bias=((stop, 50.0),))
    assert biased.index(stop) == 6 == len(biased) - 1


def test_penalties_count_prompt_and_answer_on_the_device_in_every_order_of_the_loop(device: Device) -> None:
    """Written out on the host with the model's own logits, which come with every token as log probabilities."""
    for order in ORDERS:
        assert answer(device, 40, order, presence_penalty=2.0, frequency_penalty=0.5, repetition_penalty=1.5) == (
            answer(device, 40, "in order", presence_penalty=2.0, frequency_penalty=0.5, repetition_penalty=1.5)
        )
    tokens = answer(device, 40, logit_bias=((41, 3.0), (42, 2.9)), presence_penalty=100.0)
    assert len(set(tokens)) == 40  # nothing is said twice
    assert not set(answer(device, 30, repetition_penalty=1e6)[:5]) & set(PROMPT)


def test_penalties_leave_with_the_request_that_asked_for_them(device: Device) -> None:
    plain = answer(device)
    answer(device, presence_penalty=100.0)
    assert answer(device) == plain
    assert len(set(answer(device, 20, presence_penalty=100.0))) == 20


@pytest.mark.parametrize("order", ORDERS)
def test_log_probabilities_come_with_their_tokens(device: Device, order: str) -> None:
    driver = driver_of(device, order)
    driver.submit("none", PROMPT, 5)
    driver.submit("some", PROMPT, 5, logprobs=3)
    driver.submit("own", PROMPT[:3], 5, logprobs=0, temperature=1.0, seed=1)
    driver.run()
    assert all(output.logprobs is None for output in driver.outputs["none"])
    told = [line for output in driver.outputs["some"] for line in output.logprobs or []]
    assert len(told) == 5
    for token, line in zip(driver.tokens("some"), told, strict=True):
        assert line.top_ids[0] == token  # greedy
        assert line.top_logprobs[0] == pytest.approx(line.logprob)
        assert len(line.top_ids) == len(line.top_logprobs) == 3
        assert sorted(line.top_logprobs, reverse=True) == list(line.top_logprobs)
    own = [line for output in driver.outputs["own"] for line in output.logprobs or []]
    assert all(line.top_ids == () and line.logprob < 0 for line in own)
    driver.close()


def mask_of(*tokens: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(4 * -(-VOCAB // 32), "little")


@pytest.mark.parametrize("slot_reuse", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_a_masked_request_waits_for_each_mask_and_stays_inside_it_while_others_run(
    device: Device, order: str, slot_reuse: bool
) -> None:
    driver = driver_of(device, order, slot_reuse=slot_reuse)
    driver.submit("masked", PROMPT, 4, is_masked=True)
    driver.submit("free", PROMPT, 9)
    allowed = [(11, 12), (20,), (VOCAB - 1,), (33, 34)]
    for output, tokens in enumerate(allowed):
        for _ in range(3):
            driver.turn()
        assert len(driver.tokens("masked")) == output
        driver.core.take(Mask("masked", output, mask_of(*tokens)))
    driver.run()
    assert driver.core.wait_ns() is None
    tokens = driver.tokens("masked")
    assert len(tokens) == 4
    assert all(token in those for token, those in zip(tokens, allowed, strict=True))
    assert driver.tokens("free") == answer(device, 9)
    driver.core.take(Mask("nobody", 0, b""))
    driver.close()


def test_a_core_that_waits_for_a_mask_sleeps_until_a_message_comes(device: Device) -> None:
    driver = driver_of(device)
    driver.submit("masked", PROMPT, 4, is_masked=True)
    driver.turn()
    assert driver.core.wait_ns() is None
    driver.core.take(Mask("masked", 0, mask_of(50)))
    assert driver.core.wait_ns() == 0
    driver.run()
    assert driver.tokens("masked") == [50]
    driver.abort("masked")
    driver.run()
    driver.close()


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS + 1))}, "stop_token_ids asks for 65"),
        ({"logit_bias": tuple((3, 1.0) for _ in range(MAX_LOGIT_BIAS + 1))}, "logit_bias asks for 513"),
        ({"logit_bias": ((VOCAB, 1.0),)}, f"token id {VOCAB}"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs asks for 21"),
    ],
)
def test_what_a_slot_has_no_room_for_is_refused(device: Device, sampling: dict[str, Any], says: str) -> None:
    driver = driver_of(device)
    driver.submit("a", PROMPT, 4, **sampling)
    driver.run()
    assert driver.finished("a").error_code == "invalid_prompt"
    assert says in (driver.finished("a").error or "")
    driver.close()


def test_on_a_cpu_a_step_planned_for_who_has_ended_costs_no_forward(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from backend_engine.devices import forwards as running

    forwards: list[int] = []
    logits_of = running.logits_of
    monkeypatch.setattr(running, "logits_of", lambda *given: [forwards.append(1), logits_of(*given)][1])
    stop = answer(device)[3]
    forwards.clear()
    driver = driver_of(device)
    driver.submit("a", PROMPT, 12, stop_token_ids=(stop,))
    driver.run()
    assert driver.tokens("a") == answer(device)[:4]
    driver.close()
    assert len(driver.steps) == 5  # the last was planned before the host had read the end
    assert len(forwards) == 4 + 12
