"""Answers on their way back: streams event by event, whole answers in one piece, an upstream's errors made plain."""

from __future__ import annotations

import msgspec

from gateway.exchange import Exchange, Headers, outcome_of
from gateway.reporter import Reporter
from gateway.surfaces.openai import ParsedRequest
from gateway.surfaces.surface import Dialect, Surface
from gateway.upstreams.attempt import answer_headers, retry_after
from gateway.upstreams.deadlines import Deadlines, Phase
from gateway.upstreams.http1 import UpstreamFault
from gateway.upstreams.pool import UpstreamAnswer
from gateway.upstreams.router import Target
from protocol.errors import ApiError
from protocol.timings import Timings
from tracing.ledger import Attempt, FirstToken, Ledger, Outcome

MAX_ANSWER_BYTES = 256 * 2**20
STATUSES = {503: 503, 504: 504, 529: 503}
"""An upstream's failures that keep their meaning (529 is Anthropic's "overloaded"); any other is a 502."""
_ENGINE_TIMING = (
    (b"engine_tokenize", "tokenize_ms"),
    (b"engine_queue", "queue_ms"),
    (b"engine_prefill", "prompt_ms"),
    (b"engine_decode", "predicted_ms"),
)
"""Name in Server-Timing -> field of the engine's report."""
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Call(msgspec.Struct, frozen=True):
    """One attempt's business: which request, to which target, within which time."""

    exchange: Exchange
    surface: Surface
    request: ParsedRequest
    target: Target
    deadlines: Deadlines

    @property
    def dialect(self) -> Dialect:
        """How the surface is spoken with the target."""
        return self.surface.dialect(self.target)

    @property
    def url(self) -> str:
        """Where the request goes."""
        return self.dialect.url(self.target.upstream.base_url, self.request)

    @property
    def keep_timings(self) -> bool:
        """The client asked to see the engine's report."""
        return self.exchange.headers.get(b"x-tokenline-timings") == b"include"


async def answer(call: Call, attempt: Attempt, response: UpstreamAnswer, reporter: Reporter) -> None:
    """Hands an upstream's answer to the client. Raises ApiError where there is none, or where it breaks off."""
    if call.request.stream and response.status < 300 and response.content_type == "text/event-stream":
        await _send_stream(call, attempt, response, reporter)
    else:
        await _send_whole(call, attempt, response)


async def _send_stream(call: Call, attempt: Attempt, response: UpstreamAnswer, reporter: Reporter) -> None:
    exchange, deadlines = call.exchange, call.deadlines
    ledger, clock = exchange.ledger, exchange.clock
    relay = call.dialect.stream(ledger, call.request, keep_timings=call.keep_timings)
    exchange.errors = relay.shape(call.surface.errors)
    while data := await _read(call, attempt, response):
        now = clock.mono_ns()
        if not ledger.first_token:
            exchange.woke(now)
        out = relay.feed(data, now)
        if relay.error is not None and not exchange.started:
            raise _error_event(relay.error, attempt.upstream)
        if not out:
            if relay.error is not None and relay.retells_errors:
                break
            continue
        # A client that reads slowly is not a silent upstream: while writing, it is the client's time that counts.
        deadlines.enter(Phase.WRITE)
        if not exchange.started:
            await exchange.start(200, _stream_headers(call, attempt, response))
        await exchange.write(out)
        if ledger.first_token and not ledger.first_token_written:
            ledger.first_token_written = clock.mono_ns()
            reporter.first_token(_first_token(ledger))
        if relay.error is not None and relay.retells_errors:
            break
    ledger.upstream_end = attempt.end = clock.mono_ns()
    tail = relay.end(ledger.upstream_end)
    if relay.error is not None and (relay.retells_errors or not exchange.started):
        raise _error_event(relay.error, attempt.upstream)
    if not relay.done and relay.error is None:
        raise _cut_short(attempt)
    if not exchange.started:
        await exchange.start(200, _stream_headers(call, attempt, response))
    deadlines.enter(Phase.WRITE)
    await exchange.write(tail, last=True)
    ledger.outcome = Outcome.OK
    if relay.error is not None:
        attempt.error = ledger.error_code = "upstream_error"
        ledger.outcome = Outcome.UPSTREAM_ERROR


async def _send_whole(call: Call, attempt: Attempt, response: UpstreamAnswer) -> None:
    exchange = call.exchange
    ledger = exchange.ledger
    pieces: list[bytes] = []
    size = 0
    while data := await _read(call, attempt, response):
        pieces.append(data)
        size += len(data)
        if size > MAX_ANSWER_BYTES:
            raise ApiError(502, "upstream_error", f"The answer is over the limit of {MAX_ANSWER_BYTES} bytes.")
    ledger.upstream_end = attempt.end = exchange.clock.mono_ns()
    body = b"".join(pieces)
    if response.status >= 300:
        _check_passable(call, response, body, attempt)
        ledger.error_code = "upstream_refused"
    else:
        body = _read_answer(call, response, body)
    ledger.outcome = outcome_of(response.status)
    headers = answer_headers(response, attempt.upstream)
    call.deadlines.enter(Phase.WRITE)
    await exchange.start(response.status, [*headers, (b"content-length", b"%d" % len(body)), _server_timing(ledger)])
    await exchange.write(body, last=True)


async def _read(call: Call, attempt: Attempt, response: UpstreamAnswer) -> bytes:
    """What arrived, as soon as anything did; empty at the end. Raises ApiError when the upstream broke off."""
    if attempt.upstream_first_byte:
        call.deadlines.enter(Phase.IDLE)
    try:
        data = await response.read()
    except UpstreamFault as error:
        raise _cut_short(attempt) from error
    if data and not attempt.upstream_first_byte:
        attempt.upstream_first_byte = call.exchange.clock.mono_ns()
    return data


def _read_answer(call: Call, response: UpstreamAnswer, body: bytes) -> bytes:
    """The client's bytes of a whole answer; its counts and timings go into the ledger."""
    ledger = call.exchange.ledger
    if response.content_type != "application/json":
        raise ApiError(
            502,
            "upstream_error",
            f"The upstream {call.target.upstream.name!r} answered with {response.content_type!r} instead of JSON; "
            "its URL probably leads to something else.",
        )
    try:
        return call.dialect.whole(ledger, call.request, body, keep_timings=call.keep_timings)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(
            502, "upstream_error", f"The upstream {call.target.upstream.name!r} answered with broken JSON."
        ) from error


def _check_passable(call: Call, response: UpstreamAnswer, body: bytes, attempt: Attempt) -> None:
    """A client error in JSON of the surface's shape goes to the client as it is; else an error of our own is raised."""
    status, upstream = response.status, attempt.upstream
    attempt.error = "status"
    if status in (401, 403):
        raise ApiError(
            502,
            "upstream_error",
            f"The upstream {upstream!r} refused the gateway's own credentials ({status}); "
            "its api_key_env is missing or wrong.",
        )
    if status < 400:
        raise ApiError(502, "upstream_error", f"The upstream {upstream!r} answered with a redirect ({status}).")
    told = _told(body)
    if status >= 500:
        message, code = told or (f"The upstream {upstream!r} failed with status {status}.", "upstream_error")
        raise ApiError(
            STATUSES.get(status, 502),
            code,
            message,
            retry_after=retry_after(response),
        )
    if told is None and status in (404, 405) and call.dialect.at_root:
        path = call.dialect.path(call.request)
        advice = f"The upstream {upstream!r} has no {path} beside its /v1; take tokenize out of its upstreams.surfaces."
        raise ApiError(400, "unsupported_surface", advice, param="model")
    if told is None:
        raise ApiError(status, "upstream_refused", f"The upstream {upstream!r} refused with status {status}.")
    if not call.surface.errors.fits(body):
        raise ApiError(status, told[1], told[0], retry_after=retry_after(response))


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody | str | None = None
    message: str = ""
    """Older vLLM: the error at the top level."""


_decode_error = msgspec.json.Decoder(_ErrorAnswer).decode


def _told(body: bytes) -> tuple[str, str] | None:
    """(message, code) of an upstream's JSON error, None where the body is no such thing."""
    try:
        found = _decode_error(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(found.error, _ErrorBody):
        message, code = found.error.message, found.error.code
    else:
        message, code = found.error or found.message, None
    return (message, code if isinstance(code, str) and code else "upstream_error") if message else None


def _error_event(data: bytes, upstream: str) -> ApiError:
    """An upstream's error that came before anything else: told with a status, since none was sent."""
    message, code = _told(data) or (f"The upstream {upstream!r} failed before its first token.", "upstream_error")
    return ApiError(502, code, message)


def _cut_short(attempt: Attempt) -> ApiError:
    stage = "stream" if attempt.upstream_first_byte else "first byte"
    attempt.error = "idle" if attempt.upstream_first_byte else "first_byte"
    return ApiError(
        502, "upstream_error", f"The upstream {attempt.upstream!r} broke off before the answer was complete ({stage})."
    )


def _stream_headers(call: Call, attempt: Attempt, response: UpstreamAnswer) -> Headers:
    kept = [
        header
        for header in answer_headers(response, attempt.upstream)
        if header[0] not in (b"cache-control", b"x-accel-buffering")
    ]
    return [*kept, *_STREAM_HEADERS, _server_timing(call.exchange.ledger)]


def _server_timing(ledger: Ledger) -> tuple[bytes, bytes]:
    """Stages that are known when the headers go out, in ms (https://www.w3.org/TR/server-timing/)."""
    last = ledger.attempts[-1]
    return b"server-timing", _engine_timing(ledger.timings) + (
        b"auth;dur=%.3f, receive;dur=%.3f, route;dur=%.3f, gateway_queue;dur=%.3f, connect;dur=%.3f, upstream;dur=%.3f"
        % (
            (ledger.authenticated - ledger.ingress) / 1e6,
            (ledger.body_read - ledger.authenticated) / 1e6,
            (ledger.routed - ledger.body_read) / 1e6,
            (ledger.admitted - ledger.routed) / 1e6,
            (last.connected - last.connect_start) / 1e6,
            (last.upstream_headers - last.connected) / 1e6,
        )
    )


def _engine_timing(timings: Timings | None) -> bytes:
    """What the engine has told: all of it on a whole answer, queue and prefill where a stream begins with a token."""
    if timings is None:
        return b""
    told = ((name, getattr(timings, field)) for name, field in _ENGINE_TIMING)
    return b"".join([b"%b;dur=%.3f, " % (name, ms) for name, ms in told if ms is not None])


def _first_token(ledger: Ledger) -> FirstToken:
    return FirstToken(
        request_id=ledger.request_id,
        worker=ledger.worker,
        model=ledger.model,
        upstream=ledger.upstream,
        surface=ledger.surface,
        ttft_ns=ledger.first_token_written - ledger.ingress,
        trace_id=ledger.trace_id,
    )
