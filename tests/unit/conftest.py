"""What every unit test may use: the command line, in a state folder of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.main import main


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """A state folder of this test alone, and a working directory without a tokenline.toml."""
    for name in list(os.environ):
        if name.startswith("TOKENLINE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TOKENLINE_STATE_DIR", str(tmp_path / "s"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "s"


@pytest.fixture
def tokenline(state, monkeypatch, capsys):
    """Runs the command: (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tokenline", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
