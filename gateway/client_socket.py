"""A client's TCP socket as the kernel sees it: how far away the client is, and what it has acknowledged."""

from __future__ import annotations

import array
import asyncio
import fcntl
import gc
import socket
import struct
import sys
from typing import Any

NOTSENT_LOWAT_BYTES = 2**14
"""What the kernel holds at most of what it can't send."""
_TCP_NOTSENT_LOWAT = 25
_SIOCOUTQ = 0x5411
# struct tcp_info (linux/tcp.h): tcpi_rtt in µs, and tcpi_bytes_acked, which kernels before 4.1 don't tell.
_TCP_INFO_BYTES = 128
_RTT = struct.Struct("I")
_RTT_OFFSET = 68
_ACKNOWLEDGED = struct.Struct("Q")
_ACKNOWLEDGED_OFFSET = 120


class ClientSocket:
    """The socket below a transport. Where there is no TCP, or no kernel that can be asked, everything is 0."""

    def __init__(self, transport: Any) -> None:
        found = transport.get_extra_info("socket") if sys.platform == "linux" else None
        self._socket = found if found is not None and found.family in (socket.AF_INET, socket.AF_INET6) else None
        self._queued = array.array("i", [0])
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)

    def rtt_ns(self) -> int:
        """The smoothed round trip."""
        information = self._information()
        return _RTT.unpack_from(information, _RTT_OFFSET)[0] * 1000 if information else 0

    def acknowledged_bytes(self) -> int:
        """How much the client's side has taken since the connection began."""
        information = self._information()
        return _ACKNOWLEDGED.unpack_from(information, _ACKNOWLEDGED_OFFSET)[0] if len(information) > 127 else 0

    def queued_bytes(self) -> int:
        """What the kernel holds: not sent, or not acknowledged."""
        if self._socket is None:
            return 0
        try:
            fcntl.ioctl(self._socket.fileno(), _SIOCOUTQ, self._queued)
        except OSError:
            return 0
        return self._queued[0]

    def _information(self) -> bytes:
        if self._socket is None:
            return b""
        try:
            return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)  # type: ignore[no-any-return]
        except OSError:
            return b""


def stream_below(transport: Any) -> asyncio.Transport | None:
    """The transport that carries the bytes of uvloop's TLS; None without TLS.

    uvloop counts only what it has not encrypted or handed down yet as unsent, and keeps 64 KiB and more below, where
    nothing tells of it. It hands out its TLS protocol but not the stream of it, which the collector's view shows.
    """
    tls = transport.get_extra_info("uvloop.sslproto")
    if tls is None:
        return None
    found = (one for one in gc.get_referents(tls) if hasattr(one, "get_write_buffer_size"))
    return next((one for one in found if one.get_extra_info("uvloop.sslproto") is None), None)
