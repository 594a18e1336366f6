"""The first start's keys: made once, kept in files of mode 0600, so that they can be printed again."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from pydantic import SecretStr

from settings.schema import Settings

ALIAS = "default"


def read_key_file(file: Path) -> str | None:
    """The key in a file, or None where there is none."""
    try:
        return file.read_text(encoding="ascii").strip() or None
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def write_key_file(file: Path, key: str) -> None:
    """Puts the whole key there at once, readable by this user alone."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(key + "\n")
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)


def with_admin_key(settings: Settings) -> Settings:
    """The settings with an admin key: the configured one, else the kept one, else a new one."""
    if settings.server.admin_key is not None:
        return settings
    file = settings.state_dir / "admin-key"
    key = read_key_file(file)
    if key is None:
        from gateway.keys.secret import ADMIN_PREFIX

        key = ADMIN_PREFIX + secrets.token_urlsafe(32)
        write_key_file(file, key)
    server = settings.server.model_copy(update={"admin_key": SecretStr(key)})
    return settings.model_copy(update={"server": server})


def tenant_key(settings: Settings) -> str:
    """A key that works: the configured one, else the kept one while it is valid, else a new one."""
    if settings.server.api_key is not None:
        return settings.server.api_key.get_secret_value()
    from gateway.keys.secret import digest
    from gateway.keys.store import KeyStore

    store = KeyStore(settings.keys_path)
    file = settings.state_dir / "key"
    kept = read_key_file(file)
    if kept is not None:
        record = store.find(digest(kept))
        if record and record.revoked_ns is None and (record.expires_ns is None or record.expires_ns > time.time_ns()):
            return kept
    secret, _ = store.create(_free_alias({record.alias for record in store.list() if record.revoked_ns is None}))
    write_key_file(file, secret)
    return secret


def _free_alias(taken: set[str]) -> str:
    """`default`, or the next one free: a lost file does not end a key that apps may hold."""
    number = 1
    alias = ALIAS
    while alias in taken:
        number += 1
        alias = f"{ALIAS}-{number}"
    return alias
