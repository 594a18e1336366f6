"""Answers that follow a grammar: JSON, JSON of a schema, tool calls. By llguidance, one mask for every output."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.errors import ApiError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from backend_engine.text.tokenizer import TokenTexts

_WHITESPACE = r"[ \n]{1,20}"
"""Between JSON's tokens. Bounded: a small model that is allowed any whitespace may write nothing else."""


def json_grammar(schema: dict[str, Any] | None) -> str:
    """The grammar of a JSON schema; of any JSON object without one."""
    return _written({"json_schema": _bounded(schema if schema is not None else {"type": "object"})})


def call_grammar(before: str, key: str, functions: Mapping[str, dict[str, Any]], after: str) -> str:
    """One tool call between two texts: `{"name": NAME, KEY: arguments}`, where `functions` maps each name to the schema
    of its arguments. Each schema stays a whole of its own, so that references within it hold."""
    rules = [
        f"start: {_quoted(before)} call {_quoted(after)}",
        "call: " + " | ".join(map(_rule, range(len(functions)))),
    ]
    for at, (name, schema) in enumerate(functions.items()):
        head = f"{{{_quoted('name')}: {_quoted(name)}, {_quoted(key)}: "
        rules.append(f"{_rule(at)}: {_quoted(head)} arguments{at} {_quoted('}')}")
        rules.append(f"arguments{at}: %json {msgspec.json.encode(_bounded(schema)).decode()}")
    return _written({"lark_grammar": "\n".join(rules) + "\n"})


def _rule(at: int) -> str:
    return f"call{at}"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}


def _written(grammar: dict[str, Any]) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()


def refusal(why: str) -> ApiError:
    """400 for a schema that can't be followed."""
    message = f"'response_format' or 'tools' holds a schema that can't be followed: {why}"
    return ApiError(400, "invalid_request", message, param="response_format")


def check_grammar(grammar: str) -> None:
    """Raises ApiError 400 for a grammar that can't be followed, with the reason."""
    from llguidance import LLMatcher

    why = LLMatcher.validate_grammar(grammar)
    if why and not why.startswith("WARNING"):
        raise refusal(why[:500])


class Grammars:
    """Makes followers of one vocabulary, which is read on first use, or by `prepare`: a third of a second for 50 000
    tokens."""

    def __init__(self, tokenizer: TokenTexts, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        return self._tokenizer.grammar_vocabulary(self._vocab_size, self._eos_token_ids)

    def prepare(self) -> None:
        """Reads the vocabulary now, so that no answer waits for it."""
        _ = self._vocabulary

    def follow(self, grammar: str) -> Follower:
        """Starts an answer."""
        from llguidance import LLMatcher

        mask_bytes = 4 * -(-self._vocab_size // 32)
        return Follower(LLMatcher(self._vocabulary, grammar, log_level=0), self._eos_token_ids, mask_bytes)


class Follower:
    """One answer: tokens in, masks out."""

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        only_end = bytearray(mask_bytes)
        for token in eos_token_ids:
            only_end[token // 8] |= 1 << token % 8
        self._only_end = bytes(only_end)

    @property
    def error(self) -> str | None:
        """Why the grammar can't be followed any more."""
        return str(self._matcher.get_error()) or None if self._matcher.is_error() else None

    def push(self, token: int) -> None:
        """The answer goes on with this token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def mask(self) -> bytes:
        """What may come next; once the grammar is complete, the end alone."""
        if self._matcher.is_stopped():
            return self._only_end
        return bytes(self._matcher.compute_bitmask()[: self._mask_bytes])
