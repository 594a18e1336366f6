"""Every surface that is served."""

from __future__ import annotations

from gateway.surfaces.count_tokens import CountByTokenize
from gateway.surfaces.messages_answer import MessageWriter
from gateway.surfaces.messages_native import MessagesNative
from gateway.surfaces.messages_request import messages_to_chat
from gateway.surfaces.openai import parse_chat, parse_other
from gateway.surfaces.responses_answer import ResponseWriter
from gateway.surfaces.responses_native import ResponsesNative
from gateway.surfaces.responses_request import responses_to_chat
from gateway.surfaces.shapes import ANTHROPIC_ERRORS
from gateway.surfaces.surface import Fallback, Native, Surface
from gateway.surfaces.translated import Translated

CHAT = Surface("chat", "/chat/completions", "chat", Native("/chat/completions"), parse_chat)
COMPLETIONS = Surface("completions", "/completions", "completions", Native("/completions"), parse_chat)
EMBEDDINGS = Surface("embeddings", "/embeddings", "embeddings", Native("/embeddings"), parse_other)
TOKENIZE = Surface("tokenize", "/tokenize", "tokenize", Native("/tokenize", at_root=True), parse_other)
DETOKENIZE = Surface("detokenize", "/detokenize", "tokenize", Native("/detokenize", at_root=True), parse_other)
RESPONSES = Surface(
    "responses",
    "/responses",
    "responses",
    ResponsesNative("/responses"),
    parse_other,
    fallback=Fallback("chat", Translated(responses_to_chat, ResponseWriter)),
)
MESSAGES = Surface(
    "messages",
    "/messages",
    "messages",
    MessagesNative("/messages"),
    parse_other,
    ANTHROPIC_ERRORS,
    Fallback("chat", Translated(messages_to_chat, MessageWriter)),
)
COUNT_TOKENS = Surface(
    "count_tokens",
    "/messages/count_tokens",
    "count_tokens",
    Native("/messages/count_tokens"),
    parse_other,
    ANTHROPIC_ERRORS,
    Fallback("tokenize", CountByTokenize()),
)
SURFACES = (CHAT, COMPLETIONS, EMBEDDINGS, TOKENIZE, DETOKENIZE, RESPONSES, MESSAGES, COUNT_TOKENS)
