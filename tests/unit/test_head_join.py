"""An answer's head and the first piece of its body in one write."""

import pytest
from transports import RememberingTransport

from gateway.head_join import MAX_JOINED_BYTES, HeadJoin

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.fixture
def below() -> RememberingTransport:
    return RememberingTransport()


def test_a_head_leaves_with_the_first_piece_and_the_next_ones_by_themselves(below: RememberingTransport) -> None:
    joined = HeadJoin(below)
    joined.hold()
    joined.write(HEAD)
    assert below.written == []
    for piece in (b"a", b"b"):
        joined.write(piece)
    assert below.written == [HEAD + b"a", b"b"]


def test_the_next_answer_on_the_connection_is_joined_too(below: RememberingTransport) -> None:
    joined = HeadJoin(below)
    for _ in range(2):
        joined.hold()
        joined.write(HEAD)
        joined.write(b"a")
    assert below.written == [HEAD + b"a"] * 2


def test_a_large_piece_is_not_copied(below: RememberingTransport) -> None:
    joined, piece = HeadJoin(below), b"x" * (MAX_JOINED_BYTES + 1)
    joined.hold()
    joined.write(HEAD)
    joined.write(piece)
    assert below.written == [HEAD, piece]
    assert below.written[1] is piece


def test_what_is_no_head_does_not_wait(below: RememberingTransport) -> None:
    joined = HeadJoin(below)
    joined.hold()
    joined.write(b"data: error\n\n")
    joined.write(b"more")
    assert below.written == [b"data: error\n\n", b"more"]


def test_a_head_without_a_body_leaves_before_the_connection_closes(below: RememberingTransport) -> None:
    joined = HeadJoin(below)
    joined.hold()
    joined.write(HEAD)
    joined.close()
    assert (below.written, below.is_closed) == ([HEAD], True)


def test_a_head_without_a_body_leaves_when_the_answer_is_complete(below: RememberingTransport) -> None:
    joined = HeadJoin(below)
    joined.hold()
    joined.write(HEAD)
    joined.release()
    joined.release()
    assert below.written == [HEAD]


def test_a_head_whose_client_has_gone_is_not_written(below: RememberingTransport) -> None:
    joined = HeadJoin(below)
    joined.hold()
    joined.write(HEAD)
    joined.forget()
    joined.release()
    assert below.written == []


def test_all_else_is_the_transport_s_own(below: RememberingTransport) -> None:
    assert HeadJoin(below).get_extra_info("nothing", "default") == "default"
