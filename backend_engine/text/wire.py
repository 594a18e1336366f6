"""What the frontend and its text processes say to each other (msgpack over ZeroMQ). Times are monotonic ns.

The detokenizer also gets the core's `Outputs`, as the bytes that the core sent.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from backend_engine.core.messages import Outputs


class Conversation(msgspec.Struct, frozen=True, tag="conversation"):
    """Chat messages as the chat template takes them: roles, texts and, with tools, calls and results."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Function tools in OpenAI's shape, as templates expect them."""
    open_answer: bool = True
    """The tokens go up to where the assistant's answer begins."""


class Prompt(msgspec.Struct, frozen=True, tag="prompt"):
    """A text to go on with, or token ids in its place."""

    text: str | None = None
    tokens: list[int] | None = None
    special: bool = True
    """With what the model puts around a text (a BOS token)."""


# -- the tokenizer's ---------------------------------------------------------------------------------------------------


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Make tokens of a prompt; with `grammar`, say too whether that can be followed."""

    job: int
    source: Conversation | Prompt
    grammar: str | None = None


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Make text of tokens at once, special tokens shown."""

    job: int
    tokens: list[int]


class Name(msgspec.Struct, frozen=True, tag="name"):
    """Each token as the vocabulary writes it."""

    job: int
    tokens: list[int]


class Done(msgspec.Struct, frozen=True, tag="done", omit_defaults=True):
    """The answer to a job: the one of these that it asked for."""

    job: int
    spent_ns: int
    tokens: list[int] = []
    text: str = ""
    names: list[str] = []


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The job can't be done as asked; the fields of an ApiError."""

    job: int
    status: int
    code: str
    message: str
    param: str | None


# -- the detokenizer's -------------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, tag="open", omit_defaults=True):
    """An answer whose outputs come from now on."""

    request_id: str
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """The one that ends the answer is no part of its text."""
    wants_logprobs: bool = False
    grammar: str | None = None
    """The answer follows it: a mask is made for every output."""


class TokenText(msgspec.Struct, frozen=True, array_like=True):
    """A token in words: its text, its bytes, its log probability."""

    text: str
    data: bytes
    logprob: float


class SampledText(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token, what else was likely there, and where in the answer's text it begins (in characters)."""

    token: TokenText
    top: tuple[TokenText, ...]
    offset: int


End = Literal["stop", "length", "error"]


class Text(msgspec.Struct, frozen=True, array_like=True):
    """New text of one answer after one step, or its end, or both."""

    request_id: str
    text: str
    end: End | None
    """Why no more comes. `error`: the core ended the request, or what it sampled breaks the grammar."""
    output_tokens: int
    """Of the whole answer so far."""
    last_token_ns: int | None
    """End of the step that sampled the last of them."""
    logprobs: list[SampledText] | None = None


class NextMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that may come next in an answer that follows a grammar; see the core's `Mask`."""

    request_id: str
    output: int
    allowed: bytes


class Texts(msgspec.Struct, frozen=True, tag="texts"):
    """The answer to one `Outputs` or `Open`; to an `Open` only if it has a grammar."""

    texts: list[Text]
    masks: list[NextMask]
    spent_ns: int
    is_step: bool
    """It answers an `Outputs`."""


# -- both --------------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag="start"):
    """To either, first of all and once: the model's files are there. The tokenizer writes its other half to
    `tokenizer_path`, the detokenizer reads it."""

    tokenizer_path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The process has what it needs and takes work."""

    load_ns: int
    """Without waiting for Start."""
    memory_bytes: int
    """Resident, when loaded."""
    tool_format: str | None = None
    """The tokenizer's: how the model writes tool calls, as its chat template shows."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The process can't work; `message` names the cause and the fix."""

    message: str


ToTokenizer = Start | Encode | Decode | Name
FromTokenizer = Done | Refused | Loaded | Broken
ToDetokenizer = Start | Open | Outputs
FromDetokenizer = Texts | Loaded | Broken

encode = msgspec.msgpack.Encoder().encode
decode_to_tokenizer = msgspec.msgpack.Decoder(ToTokenizer).decode
decode_from_tokenizer = msgspec.msgpack.Decoder(FromTokenizer).decode
decode_to_detokenizer = msgspec.msgpack.Decoder(ToDetokenizer).decode
decode_from_detokenizer = msgspec.msgpack.Decoder(FromDetokenizer).decode
