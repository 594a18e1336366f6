"""The admin key at the ops listener: where it may stand in a request, and whether it is the right one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping


def offered_key(headers: Mapping[str, str]) -> str:
    """The key in `Authorization: Bearer KEY` or `x-api-key: KEY`; empty where there is none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def is_key(offered: str, expected_hash: bytes) -> bool:
    """Whether SHA-256 of `offered` is `expected_hash`. Digests are compared, in constant time."""
    digest = hashlib.sha256(offered.encode("utf-8", "surrogatepass")).digest()
    return hmac.compare_digest(digest, expected_hash)
