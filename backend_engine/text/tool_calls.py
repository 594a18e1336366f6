"""Tool calls read off an answer's text as it comes: what is no call is content, and a call is told when it is whole.

Both forms end up as OpenAI has them: a name, and arguments as the JSON text that the model wrote.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from backend_engine.text.tool_formats import HERMES

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Call(msgspec.Struct, frozen=True):
    """One call."""

    name: str
    arguments: str
    """JSON."""


class CallParser(Protocol):
    """One answer."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Content that may be shown now, and calls that are complete."""

    def finish(self) -> tuple[str, list[Call]]:
        """The rest; nothing follows. What only began like a call, or is no valid one, is content."""


class _Written(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Written).decode


def _call(text: str) -> Call | None:
    """A call as models write it; None if it is none. Its arguments may be an object, or a string that holds one."""
    try:
        written = _decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    arguments = bytes(written.arguments or written.parameters or b"{}").decode()
    if arguments.startswith('"'):
        arguments = msgspec.json.decode(arguments, type=str)
    return Call(written.name, arguments) if arguments.lstrip().startswith("{") else None


class HermesParser:
    """`<tool_call>JSON</tool_call>`, any number of times, with content before and between."""

    def __init__(self) -> None:
        self._held = ""
        self._is_in_call = False
        self._has_called = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        content, calls = "", []
        while True:
            if self._is_in_call:
                end = self._held.find(CLOSE)
                if end < 0:
                    break
                body, self._held = self._held[:end], self._held[end + len(CLOSE) :]
                self._is_in_call = False
                call = _call(body)
                if call is None:
                    content += OPEN + body + CLOSE
                else:
                    calls.append(call)
                    self._has_called = True
                continue
            at = self._held.find(OPEN)
            if at < 0:
                keep = _beginning(self._held, OPEN)
                shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                content += self._content(shown)
                break
            content += self._content(self._held[:at])
            self._held = self._held[at + len(OPEN) :]
            self._is_in_call = True
        return content, calls

    def _content(self, text: str) -> str:
        """White space after a call only sets it off from what follows."""
        return "" if self._has_called and not text.strip() else text

    def finish(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        if not self._is_in_call:
            return self._content(held), []
        call = _call(held)  # a model that ends without the closing mark has called all the same
        return ("", [call]) if call is not None else (OPEN + held, [])


class Llama3Parser:
    """JSON objects as the whole answer, with `;` between several; an answer that begins otherwise is content."""

    def __init__(self) -> None:
        self._held = ""
        self._is_content = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        if self._is_content:
            return text, []
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun[0] == "{" or PYTHON_TAG.startswith(begun[: len(PYTHON_TAG)]):
            return "", []
        self._is_content = True
        held, self._held = self._held, ""
        return held, []

    def finish(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        found = [_call(part) for part in _objects(held.strip().removeprefix(PYTHON_TAG))]
        calls = [call for call in found if call is not None]
        return ("", calls) if found and len(calls) == len(found) else (held, [])


PYTHON_TAG = "<|python_tag|>"


def _objects(text: str) -> list[str]:
    """The objects of a text, apart; a `;` within a string is none between objects."""
    parts, start, is_string, is_escaped, depth = [], 0, False, False, 0
    for at, letter in enumerate(text):
        if is_string:
            is_string = letter != '"' or is_escaped
            is_escaped = letter == "\\" and not is_escaped
        elif letter == '"':
            is_string = True
        elif letter in "{}":
            depth += 1 if letter == "{" else -1
        elif letter == ";" and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _beginning(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def parser_for(tool_format: str) -> CallParser:
    """A new answer's."""
    return HermesParser() if tool_format == HERMES else Llama3Parser()
