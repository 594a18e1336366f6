"""The console of an observer's process, asked as a browser asks: a cookie, redirects, pages over HTTP."""

from __future__ import annotations

import httpx
import pytest
from console_rig import Page
from observer_rig import ADMIN_KEY, ObserverProcess, Start, WorkerLink, closing, engine_spans, here

from tracing.ledger import Closed


@pytest.fixture
def browser(shared: ObserverProcess) -> httpx.Client:
    return httpx.Client(
        base_url=shared.http.base_url,
        timeout=5,
        trust_env=False,
        follow_redirects=True,
        headers={"accept": "text/html"},
    )


def log_in(browser: httpx.Client, address: str) -> httpx.Response:
    """Asks for a page, fills in the form that comes, and gives the page that comes then."""
    form = browser.get(address)
    assert form.url.path == "/console/login"
    page = Page(form)
    (target,) = page.all("input", name="next")
    (there,) = page.all("form", method="post")
    return browser.post(there["action"], data={"next": target["value"], "key": ADMIN_KEY})


def test_from_a_link_by_way_of_the_key_to_the_request(shared: ObserverProcess, browser: httpx.Client) -> None:
    link = WorkerLink(shared.settings.intake_socket)
    made = here(701, client_request_id="from-the-app")
    link.send(*closing(made))
    shared.find("req_701")
    answer = log_in(browser, "/console/requests/from-the-app?lang=en")
    assert (answer.status_code, str(answer.url.path)) == (200, "/console/requests/from-the-app")
    page = Page(answer)
    assert "Spans of the engine are still awaited" in page.text
    assert shared.post_spans(*engine_spans(made)).status_code == 200
    answer = browser.get("/console/requests", params={"id": made.trace_id})
    page = Page(answer)
    assert answer.url.path == f"/console/requests/{made.trace_id}"
    assert "still awaited" not in page.text
    assert "11 emitted, 0 derived" in page.text
    assert "81.5 ms" in page.text
    (record,) = shared.find("req_701", spans=1)
    assert browser.get("/console/requests/req_701?format=json").json()["matches"] == [record]
    left = browser.post("/console/logout")
    assert left.url.path == "/console/login"
    assert browser.get("/console").url.path == "/console/login"


def test_a_session_does_not_outlive_the_process(start: Start) -> None:
    observer = start().wait_healthy()
    with httpx.Client(base_url=observer.http.base_url, timeout=5, trust_env=False, follow_redirects=True) as browser:
        assert log_in(browser, "/console").url.path == "/console"
        assert observer.terminate() == 0
        again = start(server={"ops_port": observer.settings.server.ops_port}).wait_healthy()
        WorkerLink(again.settings.intake_socket).send(Closed(here(1)))
        again.find("req_1")
        assert browser.get("/console/requests/req_1").url.path == "/console/login"


def test_whatever_is_sent_to_the_door_the_observer_lives(shared: ObserverProcess, browser: httpx.Client) -> None:
    for content in (b"", b"\x00" * 5_000, b"key=" + b"%" * 8_000, b"key=x" * 10_000, "key=ключ".encode()):
        assert 400 <= browser.post("/console/login", content=content).status_code < 500
    for path in (
        "/console/%00",
        "/console/requests/%0a",
        "/console/requests/..%2f..%2fetc",
        "/console/requests/" + "y" * 9_000,
    ):
        assert browser.get(path).status_code < 500
    assert browser.get("/console", headers={"cookie": "tokenline_console=" + "=" * 3_000}).status_code == 200
    assert shared.http.get("/healthz").status_code == 200
