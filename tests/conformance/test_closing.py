"""Many requests at once through the whole line on the simulated device: every timeline closes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from closing_rig import check_samples, check_streams, check_whole
from line_rig import Line, line

REQUESTS = 500
WHOLE = 60


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder: Path = tmp_path_factory.mktemp("closing")
    variables = {
        "TOKENLINE_SIMULATED__FORWARD_MS": "2",
        "TOKENLINE_SIMULATED__PREFILL_TOKEN_US": "20",
        "TOKENLINE_SCHEDULER__MAX_NUM_SEQS": "16",
    }
    with line(folder, "--device", "simulated", **variables) as found:
        yield found


async def test_500_mixed_streams_close_to_their_ttft(up: Line, record_property: Any) -> None:
    await check_streams(up, REQUESTS, record_property)


def test_every_sample_of_them_is_on_the_page_once(up: Line) -> None:
    check_samples(up, REQUESTS)


async def test_whole_answers_close_to_their_duration(up: Line, record_property: Any) -> None:
    await check_whole(up, WHOLE, record_property)
