"""The tools of tests/deploy/requirements.txt, in an environment of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """The path of a program of that environment. Skips where `make deploy-check` has not made it."""
    folder = os.environ.get("DEPLOY_TOOLS")

    def find(name: str) -> str:
        path = Path(folder, "bin", name).absolute() if folder else None
        if path is None or not path.exists():
            pytest.skip("the tools are not installed; `make deploy-check` does that")
        return str(path)

    return find


@pytest.fixture(scope="session")
def program() -> Callable[[str, str], str]:
    """The path of a program of the system. Skips where it can't be had."""

    def find(name: str, package: str) -> str:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"{name} is not installed (Debian and Ubuntu: apt-get install {package})")
        return found

    return find
