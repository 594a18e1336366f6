"""What is known of a tenant key. Its secret is not: that was shown once."""

from __future__ import annotations

import msgspec


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

    def public(self) -> dict[str, object]:
        """What may be shown: everything but the digest."""
        fields = msgspec.structs.asdict(self)
        del fields["digest"]
        return fields | {"models": list(self.models)}

    def may_use(self, model: str) -> bool:
        """Whether this key may ask for a public model."""
        return not self.models or model in self.models
