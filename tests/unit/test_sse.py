"""The SSE splitter against a one-shot reference, for any line end and any cut."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import sse
from protocol.sse import EventSplitter, EventTooLarge, event_data

LINE_ENDS = (b"\n", b"\r\n", b"\r")


def split_at(data: bytes, cuts: list[int]) -> list[bytes]:
    points = sorted({min(cut, len(data)) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *points], [*points, len(data)], strict=True)]


def reference(stream: bytes) -> list[bytes | None]:
    """Data of each event, by the standard's line-wise algorithm on the whole text."""
    lines = re.split(rb"\r\n|\n|\r", stream)
    found: list[bytes | None] = []
    data: list[bytes] = []
    for line in lines:
        if line == b"":
            if data:
                found.append(b"\n".join(data))
            data = []
        elif line.startswith(b"data"):
            name, colon, value = line.partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" ") if colon else b"")
    return found


field = st.sampled_from(
    [b"data: x", b"data:y", b"data", b": comment", b"event: ping", "data: é漢🙂".encode(), b"id: 7"]
)
event = st.lists(field, min_size=1, max_size=3)


@given(
    events=st.lists(st.tuples(event, st.sampled_from(LINE_ENDS)), max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_any_cut_and_any_line_end_give_the_same_events(events: list, cuts: list[int]) -> None:
    stream = b"".join(end.join(lines) + end + end for lines, end in events)
    splitter = EventSplitter()
    out = [e for piece in split_at(stream, cuts) for e in splitter.feed(piece)]
    rest = splitter.flush()
    assert b"".join(out) + rest == stream
    datas = [d for d in (event_data(e) for e in [*out, rest]) if d is not None]
    assert datas == reference(stream)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_no_byte_is_lost_or_made_up(stream: bytes, cuts: list[int]) -> None:
    splitter = EventSplitter()
    out = [e for piece in split_at(stream, cuts) for e in splitter.feed(piece)]
    assert b"".join(out) + splitter.flush() == stream


def test_an_event_is_given_as_soon_as_its_last_byte_came() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\nda") == [b"data: a\n\n"]
    assert splitter.feed(b"ta: b\n\ndata: c\n\n") == [b"data: b\n\n", b"data: c\n\n"]


@pytest.mark.parametrize("end", LINE_ENDS)
def test_every_line_end_is_known(end: bytes) -> None:
    stream = b"event: x" + end + b"data: 1" + end + b"data: 2" + end + end
    splitter = EventSplitter()
    out = splitter.feed(stream) or [splitter.flush()]
    assert event_data(out[0]) == b"1\n2"


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 10)
    with pytest.raises(EventTooLarge):
        EventSplitter().feed(b"data: 0123456789")
