"""Reading the key from a request's headers, with an error for each way in which people get it wrong."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.keys.secret import ADMIN_PREFIX, PREFIX, is_well_formed
from protocol.errors import ApiError

CREDENTIAL_HEADERS = (b"authorization", b"x-api-key", b"api-key")
OTHER_SCHEMES = frozenset({"basic", "digest", "token", "apikey", "negotiate"})
_EXPECTED = "Send the key as 'Authorization: Bearer sk-tl-...' (or x-api-key, or api-key)."


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The one key that the headers hold. Raises ApiError 401 that says what was seen, never the key itself."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name in CREDENTIAL_HEADERS:
            key = _bearer(value) if name == b"authorization" else value.decode("latin-1")
            shown = name.decode()
            if found.get(shown, key) != key:
                raise ApiError(401, "conflicting_credentials", f"Two different {shown} headers came. Send one.")
            found[shown] = key
    if any(key.strip() for key in found.values()):
        # An empty header beside a key is a leftover, not a second credential.
        found = {name: key for name, key in found.items() if key.strip()}
    if not found:
        raise ApiError(401, "missing_key", f"No API key came with the request. {_EXPECTED}")
    if len(set(found.values())) > 1:
        names = " and ".join(found)
        raise ApiError(
            401,
            "conflicting_credentials",
            f"Two different credentials came at once, in {names}. Send only one; a leftover token of another "
            "provider (an OAuth login, an old environment variable) is the usual cause.",
        )
    return _clean(next(iter(found.values())))


def _bearer(value: bytes) -> str:
    text = value.decode("latin-1")
    scheme, space, rest = text.partition(" ")
    if scheme.lower() == "bearer" and space:
        return rest
    if scheme.lower() == "bearer":
        seen = "The Authorization header says Bearer but holds no key."
    elif space and scheme.lower() in OTHER_SCHEMES:
        seen = f"The Authorization header has the scheme {scheme}."
    else:
        seen = "The Authorization header has no 'Bearer ' before the key."
    raise ApiError(401, "malformed_authorization", f"{seen} {_EXPECTED}")


def _clean(key: str) -> str:
    if not key or key.isspace():
        raise ApiError(401, "missing_key", f"The API key is empty; an unset variable is the usual cause. {_EXPECTED}")
    if any(character.isspace() for character in key) or "\\n" in key:
        raise ApiError(
            401,
            "key_has_whitespace",
            "The API key contains white space (a space, tab or newline); it was probably copied or read from a file "
            "with a line end. Remove it.",
        )
    return key


def unknown_key(key: str) -> ApiError:
    """The 401 for a key that no record matches, with the likeliest slip."""
    if key.startswith(ADMIN_PREFIX):
        slip = "It is an admin key, which is for the ops listener; apps use a key made by `tokenline keys create`."
    elif key.startswith(PREFIX):
        slip = (
            "It has the right form, so it belongs to another gateway or was deleted."
            if is_well_formed(key)
            else "Its checksum is wrong, so it was cut short or mistyped."
        )
    elif key[0] in "\"'":
        slip = "It is in quotes, which belong to the file or shell that it came from."
    elif key.startswith("$"):
        slip = "It looks like a variable that was not expanded."
    else:
        slip = f"Keys of this gateway begin with {PREFIX}; this one looks like another provider's."
    return ApiError(401, "unknown_key", f"The API key is not known here. {slip}")
