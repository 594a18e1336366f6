"""Secrets in files: how Docker, Kubernetes and systemd hand them over."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings.catalogue import catalogue
from settings.errors import SettingsError
from settings.loader import load_settings

SECRETS = [key for key in catalogue() if key.secret]


def test_every_secret_can_come_from_a_file(tmp_path: Path) -> None:
    assert SECRETS
    for key in SECRETS:
        file = tmp_path / key.dotted
        file.write_text("redis://:s3cret@host:6379/0\n")
        loaded = load_settings(environ={f"{key.environment}_FILE": str(file)})
        section, name = key.path
        assert getattr(getattr(loaded.settings, section), name).get_secret_value() == "redis://:s3cret@host:6379/0"
        assert loaded.origins[key.dotted].startswith(f"{key.environment}_FILE")


def test_a_file_that_is_not_there_or_empty_is_named(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.write_text("\n")
    for file, fault in ((missing, "No such file"), (empty, "is empty")):
        with pytest.raises(SettingsError, match=fault) as error:
            load_settings(environ={"TOKENLINE_SERVER__ADMIN_KEY_FILE": str(file)})
        assert str(file) in str(error.value)
        assert "TOKENLINE_SERVER__ADMIN_KEY_FILE" in str(error.value)


def test_the_value_and_its_file_at_once_are_refused_without_showing_either(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("in-the-file")
    environ = {"TOKENLINE_SERVER__API_KEY": "in-the-variable", "TOKENLINE_SERVER__API_KEY_FILE": str(file)}
    with pytest.raises(SettingsError, match="both set") as error:
        load_settings(environ=environ)
    assert "in-the" not in str(error.value)


def test_what_is_no_secret_takes_no_file() -> None:
    with pytest.raises(SettingsError, match="unknown key"):
        load_settings(environ={"TOKENLINE_SERVER__PORT_FILE": "/etc/hostname"})
