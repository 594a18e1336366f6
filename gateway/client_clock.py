"""`X-Request-Start`: when a request left the client or the proxy in front of us, by their clock."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence


class TrustedProxies:
    """Whose word on time is believed. Raises ValueError for what is neither an address nor a network."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]

    def trust(self, client: tuple[str, int] | None) -> bool:
        """Whether the peer is one of them."""
        if not self._networks or client is None:
            return False
        try:
            address = ipaddress.ip_address(client[0])
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def request_start_ns(header: bytes) -> int | None:
    """Nanoseconds since 1970 of `t=` or bare seconds, milliseconds or microseconds, told apart by size; else None."""
    text = header.strip().removeprefix(b"t=")
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number) or number <= 0:
        return None
    for limit, scale in ((1e11, 1e9), (1e14, 1e6), (1e17, 1e3)):
        if number < limit:
            return round(number * scale)
    return None
