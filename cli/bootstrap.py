"""The first start's keys: made once, kept in files of mode 0600, so that they can be printed again."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from cli.errors import CliError, Exit
from settings.schema import Settings

if TYPE_CHECKING:
    from gateway.keys.record import KeyRecord
    from gateway.keys.stores import Keys

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


def admin_key_file(settings: Settings) -> Path:
    """Where the admin key is kept that no setting names."""
    return settings.state_dir / "admin-key"


def with_admin_key(settings: Settings) -> Settings:
    """The settings with an admin key: the configured one, else the kept one, else a new one."""
    if settings.server.admin_key is not None:
        return settings
    file = admin_key_file(settings)
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
    from gateway.keys.changes import StoreUnreachable
    from gateway.keys.secret import digest
    from gateway.keys.stores import open_store

    store = open_store(settings)
    file = settings.state_dir / "key"
    kept = read_key_file(file)
    try:
        if kept is not None and _works(store.find(digest(kept)), digest(kept)):
            return kept
        secret = _new_key(store)
    except StoreUnreachable as error:
        if kept is not None:
            return kept  # the gateway starts without Redis too
        raise CliError(f"redis.url is set, and the first key can't be made there: {error}", Exit.UNREACHABLE) from None
    write_key_file(file, secret)
    return secret


def _works(record: KeyRecord | None, secret_digest: bytes) -> bool:
    if record is None or record.revoked_ns is not None or record.digest != secret_digest:
        return False
    return record.expires_ns is None or record.expires_ns > time.time_ns()


def _new_key(store: Keys) -> str:
    from gateway.keys.record import NewKey

    alias = _free_alias({record.alias for record in store.list() if record.revoked_ns is None})
    return store.create(NewKey(alias))[0]


def _free_alias(taken: set[str]) -> str:
    """`default`, or the next one free: a lost file does not end a key that apps may hold."""
    number = 1
    alias = ALIAS
    while alias in taken:
        number += 1
        alias = f"{ALIAS}-{number}"
    return alias
