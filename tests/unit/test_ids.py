"""Identifiers: unique, well-formed, and strict about what a client sends."""

import pytest

from protocol.ids import (
    accepted_client_id,
    accepted_gateway_id,
    format_traceparent,
    new_request_id,
    new_span_id,
    new_trace_id,
    parse_traceparent,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_ids_are_unique_and_a_traceparent_reads_back() -> None:
    assert len({new_request_id() for _ in range(10_000)}) == 10_000
    trace_id, span_id = new_trace_id(), new_span_id()
    assert parse_traceparent(format_traceparent(trace_id, span_id)) == (trace_id, span_id, 1)


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", True),
        (f"01-{TRACE}-{SPAN}-01-more", True),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE[1:]}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}-01\n", False),
        ("", False),
    ],
)
def test_only_a_valid_traceparent_is_continued(value: str, valid: bool) -> None:
    assert (parse_traceparent(value) is not None) == valid


@pytest.mark.parametrize("value", ["a", "A.b_c-9", "x" * 128])
def test_a_harmless_client_id_is_kept(value: str) -> None:
    assert accepted_client_id(value) == value


@pytest.mark.parametrize(
    "value", ["", "x" * 129, "a b", "a\r\nset-cookie: x", "é", "a\n", "req_" + "0a" * 12, "REQ_" + "0A" * 12, TRACE]
)
def test_any_other_client_id_is_replaced(value: str) -> None:
    assert accepted_client_id(value) is None


def test_only_an_id_that_a_gateway_of_ours_made_is_taken_for_the_gateways() -> None:
    made = new_request_id()
    assert accepted_gateway_id(made) == made
    assert [
        accepted_gateway_id(value) for value in ("mine-1", "req_7", made.upper(), made + "0", made + "\n", TRACE)
    ] == ([None] * 6)
