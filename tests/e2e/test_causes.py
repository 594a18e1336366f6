"""Each cause that can be provoked is the one that `tokenline why` names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from line_rig import Line
from provoke_causes import CAUSES, Provoker, provoker, verdict_on

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def provoked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Provoker, Line]]:
    with provoker(tmp_path_factory.mktemp("causes")) as found:
        yield found


@pytest.mark.parametrize("cause", CAUSES)
def test_why_names_the_cause_that_was_provoked(provoked: tuple[Provoker, Line], cause: str) -> None:
    provoke, up = provoked
    verdict = verdict_on(up, CAUSES[cause](provoke))
    assert verdict["cause"] == cause, verdict
    assert verdict["action"]
    assert verdict["text"]
    assert verdict["confidence"] in ("low", "medium", "high")
    assert verdict["excess"][0].keys() == {"stage", "ms", "share"}
    shares = [part["share"] for part in verdict["excess"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=0.01)
