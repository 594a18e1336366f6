"""Who is logged in to the console: signed tokens that expire, and a slow door for those who guess."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Callable

from tracing.clock import Clock

LIFETIME_SECONDS = 8 * 3600
MAX_ENDED = 1_000
TRIES = 5
SECONDS_PER_TRY = 6.0
MAX_ADDRESSES = 1_024

_ID_BYTES, _TIME_BYTES, _MAC_BYTES = 16, 8, 32


class Sessions:
    """Tokens `id, expiry, HMAC` under a secret of this process: none outlives it, none tells anything of the key."""

    def __init__(self, clock: Clock, token_bytes: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._clock = clock
        self._token_bytes = token_bytes
        self._secret = token_bytes(32)
        self._ended: dict[bytes, int] = {}
        """Sessions that were logged out of -> their expiry."""

    def issue(self) -> str:
        """The token of a new session."""
        expiry_ns = self._clock.mono_ns() + LIFETIME_SECONDS * 1_000_000_000
        body = self._token_bytes(_ID_BYTES) + expiry_ns.to_bytes(_TIME_BYTES, "big")
        return base64.urlsafe_b64encode(body + self._sign(body)).decode().rstrip("=")

    def is_valid(self, token: str) -> bool:
        """Whether this process issued the token, and it neither expired nor was ended."""
        opened = self._open(token)
        return opened is not None and opened[1] > self._clock.mono_ns() and opened[0] not in self._ended

    def end(self, token: str) -> None:
        """Logs out: a copy of the token is worth nothing any more."""
        if not self.is_valid(token):
            return
        now_ns = self._clock.mono_ns()
        self._ended = {session: expiry for session, expiry in self._ended.items() if expiry > now_ns}
        if len(self._ended) >= MAX_ENDED:  # more than can be remembered: everybody logs in anew
            self._secret = self._token_bytes(32)
            self._ended = {}
            return
        opened = self._open(token)
        assert opened is not None
        self._ended[opened[0]] = opened[1]

    def _open(self, token: str) -> tuple[bytes, int] | None:
        """(id, expiry in monotonic ns) of a token whose signature is right."""
        try:
            raw = base64.b64decode(token.encode("ascii") + b"=" * (-len(token) % 4), b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            return None
        body, mac = raw[: _ID_BYTES + _TIME_BYTES], raw[_ID_BYTES + _TIME_BYTES :]
        if len(mac) != _MAC_BYTES or not hmac.compare_digest(self._sign(body), mac):
            return None
        return body[:_ID_BYTES], int.from_bytes(body[_ID_BYTES:], "big")

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, body, "sha256")


class Throttle:
    """Wrong keys of one address: TRIES at once, then one every SECONDS_PER_TRY. Addresses are bounded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()
        """Address -> when all its tries are free again, monotonic seconds; least recent failure first."""

    def wait_seconds(self, address: str) -> float:
        """How long until a key from this address is looked at; 0: now."""
        busy_seconds = self._free_at.get(_group(address), 0.0) - self._now()
        return max(0.0, busy_seconds - (TRIES - 1) * SECONDS_PER_TRY)

    def failed(self, address: str) -> None:
        """A wrong key came from there."""
        group = _group(address)
        self._free_at[group] = max(self._free_at.get(group, 0.0), self._now()) + SECONDS_PER_TRY
        self._free_at.move_to_end(group)
        if len(self._free_at) > MAX_ADDRESSES:
            self._free_at.popitem(last=False)

    def _now(self) -> float:
        return self._clock.mono_ns() / 1e9


def _group(address: str) -> str:
    """Whom an address belongs to: an IPv6 host has a whole /64 to itself."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return address
