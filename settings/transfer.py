"""Settings on their way to a child process, secrets included. For a pipe, never for an argument or a log."""

from __future__ import annotations

import json
from typing import Any

from pydantic import SecretStr

from settings.schema import Settings


def pack_settings(settings: Settings) -> bytes:
    """One line of JSON."""
    return json.dumps(settings.model_dump(mode="python"), default=_plain).encode()


def unpack_settings(line: bytes) -> Settings:
    """The settings that `pack_settings` packed."""
    return Settings.model_validate_json(line)


def _plain(value: Any) -> Any:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
