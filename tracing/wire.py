"""Frames on the intake socket: a 4-byte big-endian length, then a msgpack list of ledger records."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tracing.ledger import Record, decode_records

MAX_FRAME_BYTES = 16 * 2**20
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">H")


def frame(records: list[bytes]) -> bytes:
    """One frame with these records, each encoded; at most 65,535."""
    head = b"\xdc" + _COUNT.pack(len(records))  # msgpack's array 16
    return b"".join([_LENGTH.pack(len(head) + sum(map(len, records))), head, *records])


class FrameReader:
    """Takes bytes as they arrive and gives whole lists of records. Raises ValueError on a frame over the limit."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Record]]:
        """The record lists completed by `data`, oldest first."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield decode_records(body)
