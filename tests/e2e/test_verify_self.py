"""`tokenline verify --self` over every surface."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def test_tokenline_passes_its_own_verification_on_every_surface() -> None:
    command = [str(Path(sys.executable).with_name("tokenline")), "verify", "--self", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    report = json.loads(done.stdout)
    assert [finding for finding in report["findings"] if finding["result"] != "pass"] == []
    assert (done.returncode, report["ok"]) == (0, True)
    assert report["passed"] > 500
