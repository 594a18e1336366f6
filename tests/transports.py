"""Transports of tests."""

import asyncio


class RememberingTransport(asyncio.Transport):
    """Sends nothing and remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_reading_now = True
        self.is_aborted = False
        self.is_closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.is_aborted or self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        self.is_reading_now = False

    def resume_reading(self) -> None:
        self.is_reading_now = True
