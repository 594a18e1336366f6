"""Each mark of a request, against what the upstream wrote and the client read."""

from __future__ import annotations

from expectation import Expect, Played


def in_order(*instants: int) -> None:
    """Instants that were reached follow one another."""
    reached = [instant for instant in instants if instant]
    assert reached == sorted(reached), instants


def check_marks(played: Played, expect: Expect) -> None:
    """Each mark, against what the upstream wrote and the client read."""
    ledger, answer = played.ledger, played.answer
    assert ledger.outcome is expect.outcome
    # A client that had left before the answer began was sent no status.
    assert ledger.status == (0 if answer.left_ns and not answer.headers_ns else expect.status)
    in_order(
        answer.sent_ns, ledger.ingress, ledger.authenticated, ledger.body_read, ledger.routed, ledger.admitted,
        *(mark for a in ledger.attempts for mark in (a.connect_start, a.end)), ledger.finish,
    )  # fmt: skip
    assert [a.upstream for a in ledger.attempts] == [name for name, _ in expect.attempts]
    assert [a.number for a in ledger.attempts] == list(range(1, len(ledger.attempts) + 1))
    if expect.reached == "queue":
        assert not ledger.admitted
        assert not ledger.attempts
        return
    last, witness = played.last, played.witness
    in_order(last.connect_start, last.connected, last.request_sent, witness.body_read_ns)
    in_order(last.connect_start, witness.received_ns, witness.body_read_ns)
    if answer.ended_ns and not answer.left_ns:
        in_order(ledger.finish, answer.ended_ns)
    if answer.left_ns:
        in_order(answer.left_ns, ledger.client_gone, ledger.finish)
        in_order(ledger.client_gone, witness.gone_ns)
    else:
        assert not ledger.client_gone
    if expect.reached == "end":
        in_order(witness.headers_ns, last.upstream_headers, last.upstream_first_byte)
    if played.stream and answer.events and answer.status == 200:
        _check_stream_marks(played)
    else:
        assert not any((ledger.first_event, ledger.first_token, ledger.first_visible, ledger.first_token_written))


def _check_stream_marks(played: Played) -> None:
    ledger, answer, witness, last = played.ledger, played.answer, played.witness, played.last
    events = [one for one in witness.writes if one.what != "comment"]
    in_order(events[0].first_ns, last.upstream_first_byte, ledger.first_event)
    in_order(events[0].last_ns, ledger.first_event, answer.events[0].at_ns)
    tokens = witness.token_events
    if not answer.token_events:
        assert not ledger.first_token
        return
    in_order(tokens[0].last_ns, ledger.first_token, ledger.first_token_written, answer.token_events[0].at_ns)
    visible = [event for event in answer.token_events if event.text]
    if written := witness.wrote("token"):
        in_order(written[0].last_ns, ledger.first_visible, visible[0].at_ns if visible else 0)
    reasoned = [event for event in answer.token_events if event.reasoning]
    assert bool(ledger.first_reasoning) == bool(witness.wrote("reasoning"))
    if reasoned:
        in_order(witness.wrote("reasoning")[0].last_ns, ledger.first_reasoning, reasoned[0].at_ns)
    assert ledger.first_token == min(x for x in (ledger.first_reasoning, ledger.first_visible) if x)
    if answer.left_ns:
        in_order(ledger.first_token, ledger.last_token)
        return
    closing = witness.wrote("token", "reasoning", "finish")[-1]
    read = [
        e for e in answer.events if e.text or e.reasoning or (e.fields.get("choices") or [{}])[0].get("finish_reason")
    ]
    in_order(closing.last_ns, ledger.last_token, read[-1].at_ns)
    assert ledger.token_events == len(tokens)
    if ledger.upstream_end:
        in_order(witness.writes[-1].last_ns, ledger.upstream_end, ledger.finish)
