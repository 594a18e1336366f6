"""What the upstream did of one request, and when: the truth that a gateway's numbers are held against."""

from __future__ import annotations

import msgspec


class Written(msgspec.Struct, frozen=True):
    """Something that the upstream wrote."""

    what: str
    """role, reasoning, token, finish, usage, error, comment, done, body, status."""
    first_ns: int
    """Before its first byte was written, monotonic ns of this host."""
    last_ns: int
    """Before the piece that completes it was written: no reader can have had it whole before."""
    data: bytes
    tokens: int = 0


class Witness(msgspec.Struct):
    """One attempt of a gateway at one script. Instants are monotonic ns of this host; 0: not reached."""

    script_id: str
    upstream: str
    number: int
    """Which attempt at this script, over all upstreams that share a Stage; from 1."""
    surface: str
    headers: dict[str, str]
    """As they came, names in lower case."""
    reused: bool = False
    """The connection had carried an answer before."""
    body: bytes = b""
    received_ns: int = 0
    """The request's headers were read."""
    body_read_ns: int = 0
    headers_ns: int = 0
    """Before the status line was written."""
    queued_ns: int = 0
    scheduled_ns: int = 0
    prefill_end_ns: int = 0
    last_token_ns: int = 0
    writes: list[Written] = []
    ended_ns: int = 0
    """After the end of the body was written."""
    gone_ns: int = 0
    """The gateway closed the connection before the end."""

    def wrote(self, *kinds: str) -> list[Written]:
        """The writes of these kinds, in order."""
        return [one for one in self.writes if one.what in kinds]

    @property
    def token_events(self) -> list[Written]:
        """Events that carried a token, reasoning included."""
        return self.wrote("token", "reasoning")
