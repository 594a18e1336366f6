"""The OTLP/HTTP receiver: POST /v1/traces, protobuf or JSON, gzip or not, after OTLP's specification.

Answers: 200 with an ExportTraceServiceResponse (partial success where spans were refused), 400 for what cannot be
read, 413 over the size limit, 415 for another content type or encoding.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import msgspec
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tracing.observer.otlp import MalformedError, from_json, from_protobuf
from tracing.spans import Span

MAX_BODY_BYTES = 16 * 2**20
"""Of the body after decompression, and before."""
INLINE_BYTES = 2**16
SLICE_SPANS = 500
PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_READERS = {PROTOBUF: from_protobuf, JSON: from_json}
_INVALID_ARGUMENT = 3
"""google.rpc.Code."""

TakeSpans = Callable[[list[Span]], None]
CountSpans = Callable[[int, int], None]
"""(accepted, rejected)."""


class RefusedError(Exception):
    """A body that is not taken: HTTP status and what to do about it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def receiver_app(take: TakeSpans, count: CountSpans) -> Starlette:
    """The application of the OTLP port. `take` gets the spans of each body, `count` their numbers."""

    async def traces(request: Request) -> Response:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            read = _READERS.get(content_type)
            if read is None:
                raise RefusedError(415, f"content type {content_type!r} is not taken; send {PROTOBUF} or {JSON}")
            body = await _body(request)
            # A long body is read in a thread, so that records have their turn.
            received = read(body) if len(body) < INLINE_BYTES else await asyncio.to_thread(read, body)
        except RefusedError as refusal:
            return _failure(content_type, refusal.status, refusal.message)
        except MalformedError as error:
            return _failure(content_type, 400, str(error))
        except ClientDisconnect:
            return Response(status_code=400)
        count(len(received.spans), received.rejected)
        for start in range(0, len(received.spans), SLICE_SPANS):
            take(received.spans[start : start + SLICE_SPANS])
            await asyncio.sleep(0)
        return _success(content_type, received.rejected, received.reason)

    return Starlette(routes=[Route("/v1/traces", traces, methods=["POST"])])


async def _body(request: Request) -> bytes:
    """The body, decompressed. Never holds more than the limit of either form."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip"):
        raise RefusedError(415, f"content encoding {encoding!r} is not taken; send gzip or none")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
    body = b"".join(chunks)
    return _gunzip(body) if encoding == "gzip" else body


def _gunzip(body: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        plain = unpacker.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise RefusedError(400, f"the body is not gzip: {error}") from error
    if len(plain) > MAX_BODY_BYTES:
        raise _too_large()
    if not unpacker.eof:
        raise RefusedError(400, "the gzip body is cut short")
    return plain


def _too_large() -> RefusedError:
    return RefusedError(413, f"the body is over {MAX_BODY_BYTES} bytes after decompression; send smaller batches")


def _success(content_type: str, rejected: int, reason: str) -> Response:
    if content_type == JSON:
        partial = {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": reason}} if rejected else {}
        return Response(msgspec.json.encode(partial), media_type=JSON)
    response = ExportTraceServiceResponse()
    if rejected:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = reason
    return Response(response.SerializeToString(), media_type=PROTOBUF)


def _failure(content_type: str, status: int, message: str) -> Response:
    """The error as a google.rpc.Status in the request's own format."""
    if content_type == PROTOBUF:
        body = Status(code=_INVALID_ARGUMENT, message=message).SerializeToString()
        return Response(body, status_code=status, media_type=PROTOBUF)
    return Response(
        msgspec.json.encode({"code": _INVALID_ARGUMENT, "message": message}), status_code=status, media_type=JSON
    )
