"""Failures: what a request that was refused or failed died of, and in which stage. Its error is evidence enough."""

from __future__ import annotations

from tracing.ledger import Ledger, Outcome
from tracing.observer.causes import Cause, Finding, Numbers, remedy
from tracing.observer.rules import SILENT_CLIENT

_REFUSED = (Outcome.CLIENT_ERROR, Outcome.AUTH_ERROR, Outcome.RATE_LIMITED)
_TIMEOUTS = ("first_byte", "idle", "total")


def cause_of_failure(ledger: Ledger) -> Finding | None:
    """None for a request that ended well, or that its client gave up."""
    stage = died_in(ledger)
    attempt = ledger.attempts[-1] if ledger.attempts else None
    numbers: Numbers = {
        "code": ledger.error_code or str(ledger.status),
        "failed": attempt.upstream if attempt else ledger.upstream,
        "model": ledger.model,
        "error": (attempt.error or str(attempt.status)) if attempt else ledger.error_code,
    }

    def found(cause: Cause, action: str, *, certain: bool = True) -> Finding:
        return Finding(remedy(cause, action), stage, certain, failed=True, numbers=numbers)

    if ledger.outcome in _REFUSED:
        return found(Cause.NONE, "mend_request")
    if ledger.outcome is Outcome.QUEUE_REJECTED:
        return found(Cause.GATEWAY_QUEUE, "enlarge_gateway_queue")
    if ledger.outcome is Outcome.GATEWAY_ERROR:
        return found(Cause.UNKNOWN, "read_gateway_log", certain=False)
    if ledger.outcome is Outcome.UPSTREAM_ERROR:
        if attempt is None:
            return found(Cause.UPSTREAM_FAILURE, "revive_upstreams")
        return found(Cause.UPSTREAM_FAILURE, "mend_upstream", certain=bool(attempt.error))
    if ledger.outcome is Outcome.UPSTREAM_TIMEOUT:
        if _client_did_not_read(ledger):
            numbers |= {
                "backpressure": ledger.backpressure_ns / 1e9,
                "unsent": ledger.unsent_bytes or None,
                "rtt": None,
            }
            return found(Cause.SLOW_CLIENT, "check_client_reading")
        if attempt is None:
            return found(Cause.GATEWAY_QUEUE, "enlarge_gateway_queue", certain=False)
        if not attempt.connected:
            return found(Cause.UPSTREAM_FAILURE, "mend_upstream")
        return found(Cause.SLOW_UPSTREAM, "check_timeout", certain=attempt.error in _TIMEOUTS)
    return None


def died_in(ledger: Ledger) -> str | None:
    """The stage that was running when the request ended early; None for one that ended well."""
    if ledger.outcome is Outcome.OK:
        return None
    for mark, stage in (
        (ledger.authenticated, "auth"),
        (ledger.body_read, "receive"),
        (ledger.routed, "route"),
        (ledger.admitted, "gateway_queue"),
    ):
        if not mark:
            return stage
    if not ledger.attempts:
        return "connect"
    last = ledger.attempts[-1]
    if not last.connected:
        return "connect"
    if not last.request_sent:
        return "send"
    if ledger.first_token_written:
        return "streaming" if not ledger.upstream_end else "closing"
    return _engine_stage(ledger)


def _engine_stage(ledger: Ledger) -> str:
    marks = ledger.timings.marks if ledger.timings is not None else None
    if marks is None or not marks.received:
        return "upstream_wait"
    for mark, stage in (
        (marks.queued, "engine_tokenize"),
        (marks.scheduled, "engine_queue"),
        (marks.prefill_end, "engine_prefill"),
    ):
        if not mark:
            return stage
    return "engine_decode"


def _client_did_not_read(ledger: Ledger) -> bool:
    """Most of the time since the first token went by with bytes that the client had not taken."""
    streamed = (ledger.finish - ledger.first_token_written) / 1e9 if ledger.first_token_written else 0.0
    return ledger.backpressure_ns / 1e9 >= max(SILENT_CLIENT, streamed / 2) and streamed > 0
