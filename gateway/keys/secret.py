"""What a tenant key looks like: `sk-tl-`, 32 random bytes in base62, a checksum. Only its SHA-256 is ever stored."""

from __future__ import annotations

import hashlib
import secrets
import zlib

PREFIX = "sk-tl-"
ADMIN_PREFIX = PREFIX + "admin-"
"""Of the ops listener's key, which is no tenant's."""
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_BODY_DIGITS = 43  # 62**43 > 2**256
_CHECK_DIGITS = 6  # 62**6 > 2**32


def _base62(number: int, digits: int) -> str:
    out = []
    for _ in range(digits):
        number, digit = divmod(number, 62)
        out.append(_ALPHABET[digit])
    return "".join(reversed(out))


def new_secret() -> str:
    """A fresh key; the only time that it is seen whole."""
    body = _base62(int.from_bytes(secrets.token_bytes(32)), _BODY_DIGITS)
    return PREFIX + body + _checksum(body)


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), _CHECK_DIGITS)


def is_well_formed(secret: str) -> bool:
    """Whether a string that begins with our prefix is one of our keys, copied whole and without a slip."""
    body, check = secret[len(PREFIX) : -_CHECK_DIGITS], secret[-_CHECK_DIGITS:]
    return secret.startswith(PREFIX) and len(body) == _BODY_DIGITS and _checksum(body) == check


def digest(secret: str) -> bytes:
    """SHA-256 of a key: what is stored and compared."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
