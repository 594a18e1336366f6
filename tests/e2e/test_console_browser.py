"""The console in a real browser: no script error, legible on a phone, in the dark, without JavaScript, from a link.

With TOKENLINE_PICTURES=FOLDER the pages are kept there as the pictures of docs/console.md.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from browser_rig import CHROMIUM, Browser, browser
from line_rig import Line, line

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]

PHONE, DESKTOP = 375, 1280
PICTURES = os.environ.get("TOKENLINE_PICTURES")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """One line with two slots, so that a third request waits in the engine's queue."""
    with line(
        tmp_path_factory.mktemp("console"), "--device", "simulated", TOKENLINE_SCHEDULER__MAX_NUM_SEQS="2"
    ) as found:
        yield found


@pytest.fixture(scope="module")
def waited(up: Line) -> str:
    """The id of a request that waited for a slot, after enough that did not."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(tokens: int) -> str:
        answer = up.chat(stream=True, max_tokens=tokens)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-tokenline-request-id"]

    for _ in range(32):
        ask(2)
    with ThreadPoolExecutor(3) as pool:
        ids = list(pool.map(ask, (30, 30, 30)))
    seen = [up.why(one) for one in ids]
    return str(max(seen, key=lambda one: one["ttft_ms"])["request_id"])


@pytest.fixture
async def page(up: Line, tmp_path: Path) -> AsyncIterator[Browser]:
    async with browser(tmp_path / "profile") as found:
        await found.look(width=DESKTOP)
        yield found


async def log_in(page: Browser, up: Line, path: str) -> None:
    """By the form, as people do it."""
    key = (Path(up.environ["TOKENLINE_STATE_DIR"]) / "admin-key").read_text().strip()
    await page.go(up.ops_url + path)
    assert await page.value("location.pathname") == "/console/login"
    await page.value(f"document.getElementById('key').value = {json.dumps(key)}")
    await page.after_load(lambda: page.value("document.querySelector('form.login button').click()"))


async def keep(page: Browser, name: str, *, width: int, height: int, dark: bool = False, top: str = "body") -> None:
    """A picture for the docs, when they are asked for. `top`: what it begins with."""
    if PICTURES:
        await page.look(width=width, height=height, dark=dark)
        await page.value(f"document.querySelector({json.dumps(top)}).scrollIntoView()")
        picture = await page.picture(whole=False)
        await asyncio.to_thread((Path(PICTURES) / f"console-{name}.png").write_bytes, picture)


async def test_the_page_is_whole_and_quiet_on_a_desktop_and_on_a_phone_by_day_and_by_night(
    up: Line, waited: str, page: Browser
) -> None:
    await log_in(page, up, f"/console/requests/{waited}")
    assert await page.value("document.querySelector('h1').textContent") == waited
    papers = set()
    for path in (f"/requests/{waited}", f"/requests/{waited}?lang=zh", "", "/requests/nobody"):
        for width in (DESKTOP, PHONE):
            for dark in (False, True):
                await page.look(width=width, dark=dark)
                await page.go(f"{up.ops_url}/console{path}")
                assert await page.value("document.documentElement.scrollWidth") <= width, (path, width)
                papers.add(await page.value("getComputedStyle(document.body).backgroundColor"))
    assert len(papers) == 2
    unexpected = [fault for fault in page.faults if "/requests/nobody" not in fault]
    assert not unexpected
    await page.go(f"{up.ops_url}/console/requests/{waited}")
    await keep(page, "request", width=DESKTOP, height=1240)
    await keep(page, "request-phone-dark", width=PHONE, height=900, dark=True, top="section:has(#timeline)")
    await keep(page, "request-usual", width=DESKTOP, height=1200, top="section:has(#baseline)")
    await page.go(f"{up.ops_url}/console")
    await keep(page, "home-dark", width=DESKTOP, height=760, dark=True)


async def test_bars_lie_where_their_stages_did(up: Line, waited: str, page: Browser) -> None:
    record = up.why(waited)
    await log_in(page, up, f"/console/requests/{waited}")
    script = """Object.fromEntries([...document.querySelector('table.chart[aria-label="Stages to the first token"]')
        .tBodies[0].rows].filter(row => row.querySelector('svg.bar rect')).map(row => {
          const whole = row.querySelector('svg.bar').getBoundingClientRect();
          const bar = row.querySelector('svg.bar rect').getBoundingClientRect();
          return [row.querySelector('.stage').textContent, [(bar.x - whole.x) / whole.width, bar.width / whole.width]];
        }))"""
    drawn = await page.value(script)
    total_ms = record["total_ms"]
    for name in ("engine_queue", "engine_prefill"):
        start_ms = record["marks"]["engine_queued" if name == "engine_queue" else "engine_scheduled"]
        assert drawn[name][0] == pytest.approx(start_ms / total_ms, abs=0.005)
        assert drawn[name][1] == pytest.approx(record["stages"][name] / total_ms, abs=0.005)


async def test_the_page_needs_no_script_and_asks_nobody_else(up: Line, waited: str, page: Browser) -> None:
    await log_in(page, up, "/console")
    await page.call("Emulation.setScriptExecutionDisabled", value=True)
    await page.go(f"{up.ops_url}/console/requests/{waited}")
    loaded = (
        "performance.getEntriesByType('resource').filter(one => !one.name.startsWith('data:')).map(one => one.name)"
    )
    assert await page.value(loaded) == []
    assert await page.value("document.querySelectorAll('table.chart svg.bar rect').length") > 10
    assert "engine_queue" in await page.value("document.body.innerText")
    await page.value("document.querySelector('details.meanings summary').click()")
    assert await page.value("document.querySelector('details.meanings dl').checkVisibility()")
    assert not page.faults


async def test_a_link_on_another_site_opens_the_page_of_who_is_logged_in(up: Line, waited: str, page: Browser) -> None:
    await log_in(page, up, "/console")
    address = f"{up.ops_url}/console/requests/{waited}"
    elsewhere = up.ops_url.replace("127.0.0.1", "localhost")
    assert elsewhere != up.ops_url
    await page.go(f"{elsewhere}/healthz")
    await page.after_load(lambda: page.value(f"location.href = {json.dumps(address)}"))
    for _ in range(100):  # the page that goes on by itself comes between
        if await page.value("document.querySelector('h1')?.textContent") == waited:
            break
        await asyncio.sleep(0.1)
    assert await page.value("document.querySelector('h1').textContent") == waited


async def test_logging_out_shuts_the_door(up: Line, waited: str, page: Browser) -> None:
    await log_in(page, up, "/console")
    await page.after_load(lambda: page.value("document.querySelector('.side form button').click()"))
    assert await page.value("location.pathname") == "/console/login"
    await page.go(f"{up.ops_url}/console/requests/{waited}")
    assert await page.value("location.pathname") == "/console/login"
