"""The report of a real run in a browser: it opens without a fault, and fits a desk and a phone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from browser_rig import CHROMIUM, browser
from line_rig import line

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
async def test_a_report_opens_without_a_fault_and_never_overflows(tmp_path):
    with line(tmp_path, "--device", "simulated", TOKENLINE_SIMULATED__FORWARD_MS="5") as up:
        up.environ |= {"TOKENLINE_API_KEY": up.key, "TOKENLINE_OPS_URL": up.ops_url}
        stages = ("--stages", "2:3s,8:3s", "--mix", "short,long", "--long-tokens", "300", "--max-output-tokens", "8")
        done = up.tokenline("bench", "run", "--base-url", up.base_url, *stages, "--json")
        assert done.returncode == 0, done.stderr
        # The gateway's stages are there for every request, and with the client's link they make up the client's TTFT.
        kept = json.loads(done.stdout)
        told = kept["stages"][0]["server_stages_ms"]
        assert {"auth", "engine_queue", "engine_prefill", "transit_back", "client_link"} <= told.keys()
        assert told["auth"]["count"] == kept["stages"][0]["ttft_ms"]["count"]
        late = ("streaming", "closing", "engine_decode")
        parts = sum(spread["mean"] for name, spread in told.items() if name not in late)
        assert parts == pytest.approx(kept["stages"][0]["ttft_from_sent_ms"]["mean"], abs=0.5)

        page = tmp_path / "r.html"
        done = up.tokenline("bench", "report", "last", "--output", str(page), "--json")
        pictures = json.loads(done.stdout)["pictures"]
        assert any(name.endswith("r-ttft-by-load.png") for name in pictures)

        # Users' traffic like the run's: nobody's fault. With load tests alone there is nothing to compare.
        done = up.tokenline("bench", "compare", "last", "--live", "1h", "--json")
        found = json.loads(done.stdout)
        assert found["verdict"]["cause"] == "unknown"
        assert found["live"]["requests"] == 0
        assert found["live"]["load_tests_left_out"] >= kept["stages"][0]["requests"]
    async with browser(tmp_path / "profile") as shown:
        for width, dark in ((1280, False), (390, True)):
            await shown.look(width=width, dark=dark)
            await shown.go(page.as_uri())
            assert await shown.value("document.querySelectorAll('svg').length") >= 10
            assert await shown.value("document.documentElement.scrollWidth") <= width
            if folder := os.environ.get("REPORT_PICTURES"):
                (Path(folder) / f"report-{width}.png").write_bytes(await shown.picture())
        assert shown.faults == []
