"""New settings for processes that run: what of them is taken into force, and what has to wait for a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from settings.checks import check_answerable, check_consistent
from settings.loader import effective_values
from settings.schema import Settings

LISTS = ("upstreams", "models")
MAPS = ("plans", "slo")
"""Tables that are reloaded as a whole, entry by entry."""
KEYS: Mapping[str, tuple[str, ...]] = {
    "server": (
        "api_key",
        "max_concurrent_requests",
        "queue_size",
        "queue_timeout_ms",
        "max_body_bytes",
        "receive_timeout_seconds",
        "client_write_timeout_seconds",
        "request_timeout_seconds",
        "connect_timeout_seconds",
        "first_byte_timeout_seconds",
        "idle_timeout_seconds",
        "max_attempts",
    ),
    "keys": ("default_plan",),
}
"""Single keys that are reloaded, by section."""


@dataclass(frozen=True)
class Change:
    """What comes of new settings. Names are dotted: `upstreams.vllm`, `server.queue_size`."""

    settings: Settings
    """In force from now on: the new ones, with what can't change while processes run as it was."""
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]
    """Different in the new settings, and not taken."""

    @property
    def is_any(self) -> bool:
        """Whether anything that is in force changes."""
        return bool(self.added or self.removed or self.changed)


def change_of(old: Settings, new: Settings) -> Change:
    """What of `new` can follow `old` without a restart. Raises SettingsError where the mixture makes no sense."""
    sections = {
        section: getattr(old, section).model_copy(update={name: getattr(getattr(new, section), name) for name in names})
        for section, names in KEYS.items()
    }
    settings = old.model_copy(update={**sections, **{table: getattr(new, table) for table in (*LISTS, *MAPS)}})
    check_consistent(settings)
    check_answerable(settings)
    before, after = _entries(old), _entries(settings)
    return Change(
        settings,
        tuple(name for name in after if name not in before),
        tuple(name for name in before if name not in after),
        tuple(name for name in after if name in before and after[name] != before[name]),
        _needing_restart(settings, new),
    )


def _entries(settings: Settings) -> dict[str, Any]:
    """What is reloaded, by dotted name; entries of lists by their own names."""
    found = {f"{table}.{entry.name}": entry for table in LISTS for entry in _listed(settings, table)}
    found |= {f"{table}.{name}": entry for table in MAPS for name, entry in getattr(settings, table).items()}
    for section, names in KEYS.items():
        found |= {f"{section}.{name}": getattr(getattr(settings, section), name) for name in names}
    return found


def _listed(settings: Settings, table: str) -> Sequence[Any]:
    entries: Sequence[Any] = getattr(settings, table)
    return entries


def _needing_restart(settings: Settings, new: Settings) -> tuple[str, ...]:
    wanted = {".".join(key): value for key, value, _ in effective_values(new)}
    given = {".".join(key): value for key, value, _ in effective_values(settings)}
    return tuple(name for name in wanted if wanted[name] != given.get(name))
