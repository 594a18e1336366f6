"""What is known of a tenant key. Its secret is not: that was shown once."""

from __future__ import annotations

import hmac

import msgspec

from gateway.keys.limits import NO_LIMITS, Limits

MAX_MODELS = 1_000


class KeyRecord(msgspec.Struct, frozen=True):
    """One key. Times are ns since 1970 UTC."""

    id: str
    alias: str
    digest: bytes
    """SHA-256 of the secret."""
    created_ns: int
    team: str | None = None
    models: tuple[str, ...] = ()
    """Public models that it may use; empty: all."""
    expires_ns: int | None = None
    revoked_ns: int | None = None
    plan: str | None = None
    limits: Limits = NO_LIMITS
    """Its own, which win over its plan's."""
    tags: tuple[str, ...] = ()
    """For the people who keep the keys; nothing depends on them."""
    rotated_ns: int | None = None
    """When its secret was last changed."""
    previous_digest: bytes | None = None
    """SHA-256 of the secret before the last rotation."""
    previous_until_ns: int | None = None
    """Until when that one still works."""

    def public(self) -> dict[str, object]:
        """What may be shown: everything but the digests."""
        fields = msgspec.structs.asdict(self)
        del fields["digest"], fields["previous_digest"]
        limits = {name: value for name, value in msgspec.structs.asdict(self.limits).items() if value is not None}
        return fields | {"models": list(self.models), "tags": list(self.tags), "limits": limits}

    def may_use(self, model: str) -> bool:
        """Whether this key may ask for a public model."""
        return not self.models or model in self.models

    def has_digest(self, secret_digest: bytes) -> bool:
        """Whether a secret with this SHA-256 is, or was before the last rotation, this key's. In constant time."""
        is_current = hmac.compare_digest(self.digest, secret_digest)
        is_previous = self.previous_digest is not None and hmac.compare_digest(self.previous_digest, secret_digest)
        return is_current or is_previous


class NewKey(msgspec.Struct, frozen=True):
    """What a key is made with. Raises ValueError for what no key can have."""

    alias: str
    team: str | None = None
    models: tuple[str, ...] = ()
    expires_ns: int | None = None
    plan: str | None = None
    limits: Limits = NO_LIMITS
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.alias.strip() or len(self.alias) > 128 or not self.alias.isprintable():
            raise ValueError("alias must be 1 to 128 printable characters")
        if self.team is not None and (len(self.team) > 128 or not self.team.isprintable()):
            raise ValueError("team must be at most 128 printable characters")
        if len(self.models) > MAX_MODELS or any(
            not 0 < len(name) <= 256 or not name.isprintable() for name in self.models
        ):
            raise ValueError(f"models must be at most {MAX_MODELS}, each of 1 to 256 printable characters")
        if len(self.tags) > 32 or any(not tag.strip() or len(tag) > 64 or not tag.isprintable() for tag in self.tags):
            raise ValueError("tags must be at most 32, each of 1 to 64 printable characters")
        for name, value in msgspec.structs.asdict(self.limits).items():
            if value is not None and not 0 < value < 2**53:
                raise ValueError(f"{name} = {value}: a limit is a whole number from 1 to 2^53")
