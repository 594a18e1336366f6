"""Who may use an engine that listens alone: one key, compared in constant time."""

from __future__ import annotations

import hmac

from backend_engine.asgi import Scope
from protocol.errors import ApiError

_HEADERS = (b"authorization", b"x-api-key", b"api-key")
_EXPECTED = "Send the engine's key (server.api_key) as 'Authorization: Bearer KEY', x-api-key or api-key."


class OneKey:
    """Checks requests against `server.api_key`."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def check(self, scope: Scope) -> None:
        """Raises ApiError 401 that says what was seen, never the key."""
        sent = [(name, value) for name, value in scope["headers"] if name in _HEADERS]
        keys = {_key_in(name, value) for name, value in sent}
        if not keys:
            raise ApiError(401, "missing_key", f"No API key came with the request. {_EXPECTED}")
        if len(keys) > 1:
            names = ", ".join(sorted({name.decode() for name, _ in sent}))
            raise ApiError(
                401, "conflicting_credentials", f"Two different keys came at once, in {names}. Send only one."
            )
        key = keys.pop()
        if not key.strip():
            raise ApiError(401, "missing_key", f"The API key is empty. {_EXPECTED}")
        if key.split() != [key]:
            raise ApiError(
                401, "key_has_whitespace", "The API key contains white space (a space, tab or newline). Remove it."
            )
        if not hmac.compare_digest(key, self._key):
            raise ApiError(401, "unknown_key", "The API key is not this engine's key (server.api_key).")


def _key_in(name: bytes, value: bytes) -> bytes:
    if name != b"authorization":
        return value
    scheme, space, rest = value.partition(b" ")
    if scheme.lower() != b"bearer" or not space:
        raise ApiError(
            401, "malformed_authorization", f"The Authorization header has no 'Bearer ' before the key. {_EXPECTED}"
        )
    return rest
