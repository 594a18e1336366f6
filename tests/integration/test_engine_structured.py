"""A real model's answers under a schema, with tools, log probabilities and penalties, through OpenAI's client.

The model is tiny and random: whatever holds of its answers is the engine's doing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
import torch
import transformers
from engine_rig import EngineProcess, engine_settings, running
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from backend_engine.text.processes import ProcessText
from backend_engine.text.tokenizer import TextError
from settings.schema import EngineSettings, SchedulerSettings

TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}] write <tool_call>\n{...}\n</tool_call>\n"
    "{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_model(folder: Path) -> None:
    """Random weights, a byte-level tokenizer of 320 tokens, and a chat template with tools in Hermes' form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<eos>"])
    tokenizer.train_from_iterator(['{"name": "Ada", "age": 36}, the quick brown fox', "assistant user"] * 9, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<eos>"),
        initializer_range=0.3,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    settings = engine_settings(
        tmp_path_factory.mktemp("state"),
        engine=EngineSettings(device="cpu", model=str(folder), served_name="tiny", cpu_kv_cache_gib=0.05),
        scheduler=SchedulerSettings(max_num_seqs=8),
    )
    with running(settings) as found:
        yield found
    assert "Traceback" not in found.output()


@pytest.fixture
def client(engine: EngineProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://engine/v1", api_key="none", http_client=engine.client(), max_retries=0)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 1} | fields


class Person(pydantic.BaseModel):
    """What is asked for."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    ages: list[int] = pydantic.Field(max_length=3)
    is_well: bool


def test_a_random_model_under_a_schema_answers_in_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**chat(response_format=Person, n=3, temperature=1, max_tokens=600))
    whole = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert whole, [choice.message.content for choice in answer.choices]
    assert all(isinstance(choice.message.parsed, Person) for choice in whole)
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_constrained_and_free_answers_share_a_batch(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["red", "green"]}}}
    streams = [client.chat.completions.create(**chat(stream=True, response_format=schema)) for _ in range(3)]
    free = client.chat.completions.create(**chat(max_tokens=20, extra_body={"ignore_eos": True}))
    for stream in streams:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert json.loads(text) in ("red", "green")
    assert free.usage is not None


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"$ref": "#/$defs/unit"}},
            "required": ["unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_random_model_that_must_call_a_tool_calls_it(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    asked = chat(tools=[WEATHER], tool_choice=choice)
    if stream:
        with client.chat.completions.stream(**asked) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    assert answer.choices[0].finish_reason == "tool_calls"
    assert not answer.choices[0].message.content


def test_log_probabilities_are_the_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat(temperature=0, max_tokens=6, logprobs=True, top_logprobs=5))
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content
    for token in content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0
        assert len(token.top_logprobs) == 5
    best = client.completions.create(model="tiny", prompt="hi", max_tokens=4, temperature=0, logprobs=3)
    assert best.choices[0].logprobs is not None
    assert len(best.choices[0].logprobs.tokens or ()) <= 4


def test_a_bias_bans_a_token_and_repetition_can_be_punished(client: openai.OpenAI, engine: EngineProcess) -> None:
    plain = client.completions.create(model="tiny", prompt="hi", max_tokens=12, temperature=0, logprobs=0)
    ((first, *_),) = [plain.choices[0].logprobs.tokens]  # type: ignore[union-attr]
    with engine.client() as http:
        (token,) = http.post("/tokenize", json={"prompt": first}).json()["tokens"]
    banned = client.completions.create(
        model="tiny", prompt="hi", max_tokens=12, temperature=0, logprobs=0, logit_bias={str(token): -100}
    )
    assert first not in (banned.choices[0].logprobs.tokens or ())  # type: ignore[union-attr]
    extra = {"repetition_penalty": 10, "min_p": 0.01, "min_tokens": 12}
    punished = client.chat.completions.create(
        **chat(max_tokens=12, temperature=0, logprobs=True, frequency_penalty=2, presence_penalty=2, extra_body=extra)
    )
    content = punished.choices[0].logprobs.content or []  # type: ignore[union-attr]
    assert (len(content), len({tuple(token.bytes or ()) for token in content})) == (12, 12)


def test_a_schema_that_cannot_be_followed_is_refused(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError, match="objekt"):
        client.chat.completions.create(**chat(response_format=schema))


async def test_a_tokenizer_that_cannot_be_loaded_is_explained(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    settings = engine_settings(tmp_path, engine=EngineSettings(device="cpu", model=str(tmp_path / "model")))
    (tmp_path / "settings.json").write_text(settings.model_dump_json())

    async def ready() -> Any:
        from backend_engine.core.messages import Ready

        return Ready("cpu", "float32", 10, 10, 0, 1, 16, (2,))

    with pytest.raises(TextError, match=str(tmp_path / "model")):
        await ProcessText(tmp_path, 8, cores=1).run(ready, object(), lambda: None)  # type: ignore[arg-type]
