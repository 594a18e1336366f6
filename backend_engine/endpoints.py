"""The data plane: from a request's bytes to its answer, top to bottom: read, parse, tokenise, submit, write."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from backend_engine.answers import ChatAnswer, CompletionAnswer
from backend_engine.asgi import (
    ClientLeft,
    Receive,
    Scope,
    Send,
    gateway_id_of,
    header,
    noticing_disconnect,
    read_body,
    request_id_of,
    send_error,
    send_json,
)
from backend_engine.fields import Fields, invalid
from backend_engine.frontend import Frontend
from backend_engine.generation import Generation
from backend_engine.prompts import check_token_ids
from backend_engine.record import RequestRecord, Surface
from backend_engine.requests import (
    GenerationRequest,
    check_model,
    parse_chat,
    parse_completion,
    parse_messages,
    parse_object,
    parse_prompt,
)
from backend_engine.text.tool_calls import parser_for
from backend_engine.text.wire import Prompt
from backend_engine.writing import AnswerWriter
from protocol import headers as names
from protocol.errors import ApiError
from protocol.ids import new_request_id, parse_traceparent
from protocol.timings import HostIdentity


class GenerationEndpoint:
    """POST /v1/chat/completions or /v1/completions."""

    def __init__(self, frontend: Frontend, host: HostIdentity, surface: Surface) -> None:
        self._frontend = frontend
        self._host = host
        self._surface: Surface = surface
        self._parse: Callable[[bytes, str], GenerationRequest]
        self._parse = parse_chat if surface == "chat" else parse_completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send, received_ns: int) -> None:
        """Answers one request."""
        frontend = self._frontend
        record = self._record(scope, received_ns)
        request_id = request_id_of(scope)
        try:
            frontend.serving()
            body = await read_body(scope, receive, frontend.settings.server.max_body_bytes)
            record.received(frontend.clock.mono_ns())
            request = self._parse(body, frontend.model)
            await self._answer(request, record, receive, send, request_id)
        except ClientLeft:
            frontend.drop(record)
        except ApiError as error:
            frontend.refuse(record, error)
            await send_error(send, receive, error, request_id)

    async def _answer(
        self, request: GenerationRequest, record: RequestRecord, receive: Receive, send: Send, request_id: str
    ) -> None:
        """Raises ClientLeft or ApiError as long as the core has not heard of the request."""
        frontend = self._frontend
        generation: Generation | None = None

        def left() -> None:
            if generation is not None:
                frontend.leave(generation)
            else:
                record.left_ns = frontend.clock.mono_ns()

        async with noticing_disconnect(receive, left):
            tokens, grammar = await frontend.tokenize(request)
            if record.left_ns is not None:
                raise ClientLeft
            generation = frontend.submit(request, tokens, grammar, record)
            try:
                await self._write(generation, request, receive, send, request_id)
            finally:
                frontend.end(generation)

    async def _write(
        self, generation: Generation, request: GenerationRequest, receive: Receive, send: Send, request_id: str
    ) -> None:
        frontend, record, parameters = self._frontend, generation.record, request.parameters
        kind = ChatAnswer if self._surface == "chat" else CompletionAnswer
        created = record.received_wall_ns // 10**9
        answer = kind(
            record.answer_id, created, frontend.model, wants_usage=parameters.wants_usage, choices=parameters.choices
        )
        has_tools = bool(request.tools.functions)
        tool_format = frontend.text.tool_format if has_tools else None
        writer = AnswerWriter(
            generation,
            answer,
            [parser_for(tool_format) for _ in generation.choices] if tool_format is not None else [],
            send,
            request_id,
            clock=frontend.clock,
            host=self._host,
            is_simulated=frontend.is_simulated,
        )
        await writer.write(receive, is_stream=parameters.is_stream, wants_usage=parameters.wants_usage)

    def _record(self, scope: Scope, received_ns: int) -> RequestRecord:
        clock = self._frontend.clock
        traceparent = header(scope, names.TRACEPARENT)
        prefix = "chatcmpl-" if self._surface == "chat" else "cmpl-"
        return RequestRecord(
            surface=self._surface,
            answer_id=prefix + new_request_id().removeprefix("req_"),
            received_ns=received_ns,
            received_wall_ns=clock.wall_ns() - (clock.mono_ns() - received_ns),
            parent=parse_traceparent(traceparent) if traceparent else None,
            gateway_request_id=gateway_id_of(scope),
        )


class JsonEndpoint:
    """POST of one JSON object, answered with another by a function that may raise ApiError."""

    def __init__(self, frontend: Frontend, handle: Callable[[Frontend, Fields], Awaitable[dict[str, Any]]]) -> None:
        self._frontend = frontend
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send, received_ns: int) -> None:
        """Answers one request."""
        request_id = request_id_of(scope)
        try:
            body = await read_body(scope, receive, self._frontend.settings.server.max_body_bytes)
            answer = msgspec.json.encode(await self._handle(self._frontend, parse_object(body)))
        except ClientLeft:
            return
        except ApiError as error:
            await send_error(send, receive, error, request_id)
        else:
            await send_json(send, 200, answer, ((names.REQUEST_ID.encode(), request_id.encode()),))


async def tokenize(frontend: Frontend, fields: Fields) -> dict[str, Any]:
    """POST /tokenize, in vLLM's shape: a `prompt`, or `messages` for the chat template."""
    limits = frontend.serving()
    check_model(fields, frontend.model, is_required=False)
    if "messages" in fields:
        is_open = bool(fields.get("add_generation_prompt", True))
        tokens = await frontend.text.encode(msgspec.structs.replace(parse_messages(fields), open_answer=is_open))
    else:
        text = parse_prompt(fields).text
        if text is None:
            raise invalid("prompt", "'prompt' must be a string; token ids are tokens already.")
        special = bool(fields.get("add_special_tokens", True))
        tokens = await frontend.text.encode(Prompt(text=text, special=special))
    wants_names = bool(fields.get("return_token_strs", False))
    return {
        "count": len(tokens),
        "max_model_len": limits.max_model_len,
        "tokens": tokens,
        "token_strs": await frontend.text.token_names(tokens) if wants_names else None,
    }


async def detokenize(frontend: Frontend, fields: Fields) -> dict[str, Any]:
    """POST /detokenize, in vLLM's shape; special tokens are shown."""
    limits = frontend.serving()
    check_model(fields, frontend.model, is_required=False)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise invalid("tokens", "'tokens' must be a list of token ids.")
    return {"prompt": await frontend.text.decode(check_token_ids(tokens, "tokens", limits.vocab_size))}


async def embeddings(frontend: Frontend, fields: Fields) -> dict[str, Any]:
    """POST /v1/embeddings: refused, with the way to get them."""
    raise ApiError(
        400,
        "unsupported_endpoint",
        f"This engine makes no embeddings; '{frontend.model}' is a language model. Serve an embedding model with "
        "another engine or a hosted API, and add it to the gateway under [[upstreams]] and [[models]].",
    )
