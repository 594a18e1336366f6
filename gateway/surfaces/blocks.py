"""A chat answer as a row of blocks: what the model thought, said and called, one after the other.

Chat sends deltas of one message; the surfaces that are translated from it want blocks that open, grow and close, one at
a time. A block closes when another opens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from protocol.errors import ApiError
from protocol.openai import Choice, Delta
from tracing.ledger import Usage


class Kind(StrEnum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    REFUSAL = "refusal"
    CALL = "call"


class Block:
    """One block so far."""

    __slots__ = ("call_id", "index", "kind", "name", "pieces")

    def __init__(self, kind: Kind, index: int, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.index = index
        """Its place in the answer, from 0."""
        self.call_id = call_id
        self.name = name
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of it; of a call, its arguments."""
        return "".join(self.pieces)


class End:
    """How the answer ended."""

    __slots__ = ("finish_reason", "stop_string", "usage")

    def __init__(self, finish_reason: str | None, stop_string: str | None, usage: Usage) -> None:
        self.finish_reason = finish_reason
        self.stop_string = stop_string
        self.usage = usage


class BlockWriter(ABC):
    """Writes blocks as the events of a surface."""

    @abstractmethod
    def begin(self) -> bytes:
        """Before the first block."""

    @abstractmethod
    def open(self, block: Block) -> bytes:
        """A block starts, empty."""

    @abstractmethod
    def add(self, block: Block, piece: str) -> bytes:
        """It grew by `piece`, never empty."""

    @abstractmethod
    def close(self, block: Block) -> bytes:
        """It is whole."""

    @abstractmethod
    def finish(self, blocks: list[Block], end: End) -> bytes:
        """After the last block."""


class Blocks:
    """Takes the first choice's deltas; gives the writer's bytes."""

    def __init__(self, writer: BlockWriter, *, with_reasoning: bool) -> None:
        self._writer = writer
        self._with_reasoning = with_reasoning
        self._open: Block | None = None
        self._call_key: object = None
        """What the upstream calls the call that is open."""
        self._closed_calls: set[object] = set()
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_string: str | None = None

    def take(self, choices: Iterable[Choice]) -> bytes:
        """The bytes for one event's choices. Raises ApiError 502 for calls that can't be put in a row."""
        out = b""
        for choice in choices:
            if choice.index != 0:
                continue
            delta = choice.delta or choice.message
            if delta is not None:
                out += self._take(delta)
            if choice.finish_reason:
                self.finish_reason = choice.finish_reason
            if isinstance(choice.stop_reason, str):
                self.stop_string = choice.stop_reason
        return out

    def finish(self, usage: Usage) -> bytes:
        """The bytes after the last event."""
        return self._close() + self._writer.finish(self.blocks, End(self.finish_reason, self.stop_string, usage))

    def _take(self, delta: Delta) -> bytes:
        out = b""
        if self._with_reasoning and delta.is_reasoning:
            out += self._grow(Kind.REASONING, plain(delta.reasoning_content) or plain(delta.reasoning))
        if delta.content:
            out += self._grow(Kind.TEXT, plain(delta.content))
        if delta.refusal:
            out += self._grow(Kind.REFUSAL, plain(delta.refusal))
        if isinstance(delta.tool_calls, list):
            for position, call in enumerate(delta.tool_calls):
                if isinstance(call, dict):
                    out += self._take_call(call, position)
        return out

    def _grow(self, kind: Kind, piece: str) -> bytes:
        if not piece:
            return b""
        out = b""
        if self._open is None or self._open.kind is not kind:
            out = self._close() + self._start(Block(kind, len(self.blocks)))
        return out + self._add(piece)

    def _take_call(self, call: dict[str, Any], position: int) -> bytes:
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        call_id, index = call.get("id") or "", call.get("index")
        if isinstance(arguments, dict):
            raise _unreadable("its arguments are no string")
        key = position if index is None else index
        if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(arguments, str):
            raise _unreadable("its id, name or arguments are no string")
        current = self._open if self._open is not None and self._open.kind is Kind.CALL else None
        # Some servers give every call index 0, or none; a new id with a name is a new call.
        has_new_id = current is not None and bool(name and call_id) and call_id != current.call_id
        is_new = current is None or key != self._call_key or has_new_id
        out = b""
        if is_new:
            if not name:
                raise _unreadable("it went back to an earlier one" if key in self._closed_calls else "it has no name")
            out = self._close()
            self._call_key = key
            block = Block(Kind.CALL, len(self.blocks), call_id or f"call_{len(self.blocks)}", name)
            out += self._start(block)
        return out + (self._add(arguments) if arguments else b"")

    def _start(self, block: Block) -> bytes:
        self._open = block
        self.blocks.append(block)
        return self._writer.open(block)

    def _add(self, piece: str) -> bytes:
        assert self._open is not None
        self._open.pieces.append(piece)
        return self._writer.add(self._open, piece)

    def _close(self) -> bytes:
        closing, self._open = self._open, None
        if closing is None:
            return b""
        if closing.kind is Kind.CALL:
            self._closed_calls.add(self._call_key)
        return self._writer.close(closing)


def plain(content: Any) -> str:
    """The text of a content that is a string, or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""


def _unreadable(why: str) -> ApiError:
    return ApiError(502, "upstream_error", f"The upstream sent a tool call that can't be translated: {why}.")
