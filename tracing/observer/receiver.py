"""The OTLP/HTTP receiver: POST /v1/traces, protobuf or JSON, gzip, deflate or plain, after OTLP's specification.

Answers: 200 with an ExportTraceServiceResponse (partial success where spans were refused), 400 for what cannot be
read, 401 without the token where one is set, 413 over the size limit, 415 for another content type or encoding, 503
with Retry-After while there is more than may be read. An error's body is a google.rpc.Status in the request's format.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import zlib
from collections.abc import Callable

import msgspec
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tracing.clock import Clock, SystemClock
from tracing.observer.gate import Gate
from tracing.observer.otlp import MalformedError, Received, from_json, from_protobuf
from tracing.spans import Span

MAX_BODY_BYTES = 16 * 2**20
"""Of the body after decompression, and before."""
INLINE_BYTES = 2**16
SLICE_SPANS = 500
RETRY_AFTER_SECONDS = 1
PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_READERS = {PROTOBUF: from_protobuf, JSON: from_json}
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_CODES = {400: 3, 401: 16, 404: 5, 405: 12, 413: 8, 415: 3, 503: 14}
"""HTTP status -> google.rpc.Code."""
_INTERNAL = 13

TakeSpans = Callable[[list[Span]], None]
CountSpans = Callable[[str, int], None]
"""(result, how many): spans accepted or rejected, and bodies refused for want of time (overloaded)."""
CountAnomaly = Callable[[str, int], None]


class RefusedError(Exception):
    """A body that is not taken: HTTP status and what to do about it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Receiver:
    """Takes bodies. `take` gets the spans of each in slices, with room for other work between."""

    def __init__(
        self,
        take: TakeSpans,
        count: CountSpans,
        anomaly: CountAnomaly,
        *,
        clock: Clock | None = None,
        token: str | None = None,
        cpu_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        self._take = take
        self._count = count
        self._anomaly = anomaly
        self._clock = clock or SystemClock()
        self._token_hash = hashlib.sha256(token.encode()).digest() if token is not None else None
        self._cpu_seconds = cpu_seconds
        self._gate = Gate(self._clock)

    def app(self) -> Starlette:
        """The application of the OTLP port."""
        routes = [Route("/v1/traces", self._traces, methods=["POST"])]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    async def _traces(self, request: Request) -> Response:
        content_type = _content_type(request)
        try:
            self._check_token(request)
            if content_type not in _READERS:
                raise RefusedError(415, f"content type {content_type!r} is not taken; send {PROTOBUF} or {JSON}")
            encoding = _encoding(request)
            if not self._gate.enter():
                self._count("overloaded", 1)
                raise RefusedError(503, "more spans come than can be read; send these again later")
            try:
                received = await self._received(request, content_type, encoding)
                await self._hand_on(received)
            finally:
                self._gate.leave()
        except RefusedError as refusal:
            return _failure(content_type, refusal.status, refusal.message)
        except MalformedError as error:
            return _failure(content_type, 400, str(error))
        except ClientDisconnect:
            return Response(status_code=400)
        return _success(content_type, received.rejected, received.reason)

    def _check_token(self, request: Request) -> None:
        """Compares digests, in constant time."""
        if self._token_hash is None:
            return
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        offered = bearer.strip() if scheme.lower() == "bearer" else ""
        digest = hashlib.sha256(offered.encode("utf-8", "surrogatepass")).digest()
        if not hmac.compare_digest(digest, self._token_hash):
            raise RefusedError(
                401, "this receiver asks for its token (server.otlp_token), as `Authorization: Bearer TOKEN`"
            )

    async def _received(self, request: Request, content_type: str, encoding: str) -> Received:
        body = await _read(request)

        def unpacked() -> Received:
            before = self._cpu_seconds()
            try:
                plain = _decompressed(body, encoding) if encoding else body
                return _READERS[content_type](plain, self._clock.wall_ns())
            finally:
                self._gate.spend(self._cpu_seconds() - before)

        # A long body is read in a thread, so that records have their turn.
        is_long = encoding != "" or len(body) >= INLINE_BYTES
        return await asyncio.to_thread(unpacked) if is_long else unpacked()

    async def _hand_on(self, received: Received) -> None:
        self._count("accepted", len(received.spans))
        self._count("rejected", received.rejected)
        for kind, times in received.anomalies.items():
            self._anomaly(kind, times)
        for start in range(0, len(received.spans), SLICE_SPANS):
            before = self._cpu_seconds()
            self._take(received.spans[start : start + SLICE_SPANS])
            self._gate.spend(self._cpu_seconds() - before)
            await asyncio.sleep(0)


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _encoding(request: Request) -> str:
    """gzip, deflate, or empty for none. Raises RefusedError."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in _WINDOW_BITS:
        raise RefusedError(415, f"content encoding {encoding!r} is not taken; send gzip, deflate or none")
    return encoding


async def _read(request: Request) -> bytes:
    """The body as it comes, never more of it than the limit."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
    return b"".join(chunks)


def _decompressed(body: bytes, encoding: str) -> bytes:
    """Never more than the limit, however much the body would unpack to. A gzip body may have several members."""
    parts: list[bytes] = []
    room = MAX_BODY_BYTES + 1
    rest = body
    while rest or not parts:
        unpacker = zlib.decompressobj(wbits=_WINDOW_BITS[encoding])
        try:
            parts.append(unpacker.decompress(rest, room))
        except zlib.error as error:
            raise RefusedError(400, f"the body is not {encoding}: {error}") from error
        room -= len(parts[-1])
        if room <= 0:
            raise _too_large()
        if not unpacker.eof:
            raise RefusedError(400, f"the {encoding} body is cut short")
        rest = unpacker.unused_data
        if rest and encoding != "gzip":
            raise RefusedError(400, f"something follows the end of the {encoding} body")
    return b"".join(parts)


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
    """The error as a google.rpc.Status in the request's own format; JSON where that is neither of ours."""
    headers = {}
    if status == 503:
        headers["retry-after"] = str(RETRY_AFTER_SECONDS)
    elif status == 401:
        headers["www-authenticate"] = "Bearer"
    code = _CODES.get(status, _INTERNAL)
    if content_type == PROTOBUF:
        body = Status(code=code, message=message).SerializeToString()
        return Response(body, status, headers, media_type=PROTOBUF)
    return Response(msgspec.json.encode({"code": code, "message": message}), status, headers, media_type=JSON)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: spans are taken by POST at /v1/traces"
    answer = _failure(_content_type(request), error.status_code, told)
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer
