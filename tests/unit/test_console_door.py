"""The console's door: nothing is shown to strangers, and a key becomes a session that can't be stolen or forged."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from console_rig import ADMIN_KEY, ConsoleRig, Page
from ledgers import numbered

from dashboards.console.sessions import LIFETIME_SECONDS, SECONDS_PER_TRY, TRIES

PAGES = ("/console", "/console/", "/console/requests/req_1", "/console/requests?id=req_1", "/console/requests/x%2Fy",
         "/console/requests/req_1?format=json", "/console/nothing")  # fmt: skip


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ConsoleRig]:
    made = ConsoleRig(tmp_path)
    made.close_request(numbered(1, model="the-secret-model"))
    yield made
    made.close()


@pytest.fixture
async def stranger(rig: ConsoleRig) -> AsyncIterator[httpx.AsyncClient]:
    async with rig.client() as client:
        yield client


async def log_in(client: httpx.AsyncClient, **fields: str) -> httpx.Response:
    return await client.post("/console/login", data={"key": ADMIN_KEY, **fields})


def cookie_of(answer: httpx.Response) -> dict[str, str]:
    """The parts of the one cookie that was set; `value` is its value."""
    (line,) = answer.headers.get_list("set-cookie")
    first, *rest = [part.strip() for part in line.split(";")]
    parts = {name.lower(): value for name, _, value in (part.partition("=") for part in rest)}
    return {"name": first.partition("=")[0], "value": first.partition("=")[2], **parts}


@pytest.mark.parametrize("path", PAGES)
async def test_a_stranger_is_shown_the_door_and_nothing_else(stranger: httpx.AsyncClient, path: str) -> None:
    answer = await stranger.get(path)
    assert answer.status_code == 303
    address = urlsplit(answer.headers["location"])
    assert (address.netloc, address.path) == ("", "/console/login")
    assert parse_qs(address.query)["next"] == [path]
    assert answer.content == b""
    form = await stranger.get(answer.headers["location"])
    assert "the-secret-model" not in form.text
    assert Page(form).all("input", name="next") == [{"type": "hidden", "name": "next", "value": path}]


async def test_the_key_opens_the_page_that_was_asked_for(rig: ConsoleRig, stranger: httpx.AsyncClient) -> None:
    answer = await log_in(stranger, next="/console/requests/req_1?lang=zh")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/requests/req_1?lang=zh")
    assert "the-secret-model" in (await stranger.get("/console/requests/req_1")).text
    again = await stranger.get("/console/login?next=/console/requests/req_1")
    assert (again.status_code, again.headers["location"]) == (303, "/console/requests/req_1")


async def test_the_cookie_is_for_the_console_alone_and_does_not_hold_the_key(stranger: httpx.AsyncClient) -> None:
    cookie = cookie_of(await log_in(stranger))
    assert cookie.keys() >= {"httponly", "path", "max-age", "samesite"}
    assert (cookie["path"], cookie["samesite"], cookie["max-age"]) == ("/console", "strict", str(LIFETIME_SECONDS))
    assert "secure" not in cookie
    assert ADMIN_KEY not in cookie["value"]
    assert "9464" in cookie["name"]  # cookies know no ports, so the name tells two instances apart


@pytest.mark.parametrize(("origin", "headers"), [
    ("https://ops.test", {}), ("http://ops.test", {"x-forwarded-proto": "https"})
])  # fmt: skip
async def test_over_tls_the_cookie_is_secure(rig: ConsoleRig, origin: str, headers: dict[str, str]) -> None:
    async with rig.client(origin=origin) as client:
        answer = await client.post("/console/login", data={"key": ADMIN_KEY}, headers=headers)
    assert "secure" in cookie_of(answer)


@pytest.mark.parametrize(
    "target", ["https://evil.test/", "//evil.test", "/admin/v1/slow", "/console\\@evil.test", "/console/logout"]
)
async def test_after_login_nobody_is_sent_elsewhere(stranger: httpx.AsyncClient, target: str) -> None:
    assert (await log_in(stranger, next=target)).headers["location"] == "/console"


async def test_a_session_ends_by_time_and_by_logout(rig: ConsoleRig) -> None:
    client = await rig.logged_in()
    copy = dict(client.cookies)
    assert (await client.get("/console")).status_code == 200
    answer = await client.post("/console/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
    assert cookie_of(answer)["max-age"] == "0"
    assert (await client.get("/console")).status_code == 303
    async with rig.client() as thief:
        thief.cookies.update(copy)
        assert (await thief.get("/console")).status_code == 303
    client = await rig.logged_in()
    rig.clock.advance_ms(LIFETIME_SECONDS * 1e3)
    assert (await client.get("/console")).status_code == 303


async def test_a_forged_cookie_is_no_session(rig: ConsoleRig, stranger: httpx.AsyncClient) -> None:
    name = cookie_of(await log_in(stranger))["name"]
    async with rig.client() as forger:
        for value in ("", "x", secrets.token_urlsafe(56), "%00", "a" * 4_000):
            forger.cookies.clear()
            forger.cookies.set(name, value)
            assert (await forger.get("/console")).status_code == 303


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {ADMIN_KEY}"}, {"x-api-key": ADMIN_KEY}])
async def test_the_key_in_a_header_works_as_for_the_admin_api(rig: ConsoleRig, headers: dict[str, str]) -> None:
    async with rig.client() as client:
        answer = await client.get("/console/requests/req_1", headers=headers)
        assert (answer.status_code, "set-cookie" in answer.headers) == (200, False)
        assert "the-secret-model" in answer.text
        assert (await client.get("/console")).status_code == 303


@pytest.mark.parametrize(
    "key",
    [
        "sk-tl-wrong",
        ADMIN_KEY[:-1],
        ADMIN_KEY + "x",
        "é" * 20,
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
async def test_a_wrong_key_opens_nothing(rig: ConsoleRig, stranger: httpx.AsyncClient, key: str) -> None:
    answer = await log_in(stranger, key=key)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert Page(answer).all("p", role="alert")
    assert key not in answer.text
    answer = await stranger.get("/console/requests/req_1", headers={"x-api-key": key.encode()})
    assert answer.status_code == 401
    assert "the-secret-model" not in answer.text


@pytest.mark.parametrize(
    "body", [b"", b"key=", b"key=%20", b"\xff\xfe", b"=&=&;;", b"next=/console", b"{}", b"a&" * 4_000]
)
async def test_a_form_without_a_key_is_asked_for_again(stranger: httpx.AsyncClient, body: bytes) -> None:
    answer = await stranger.post("/console/login", content=body)
    assert answer.status_code == 422
    assert Page(answer).all("input", name="key")


async def test_a_form_that_is_no_login_is_refused(stranger: httpx.AsyncClient) -> None:
    assert (await stranger.post("/console/login", content=b"key=" + b"x" * 100_000)).status_code == 413


async def test_guessing_is_slow_even_for_the_right_guess_and_only_for_who_guesses(rig: ConsoleRig) -> None:
    async with rig.client(address="192.0.2.1") as guesser, rig.client(address="192.0.2.2") as other:
        for number in range(TRIES):
            by_form = number % 2
            answer = (
                await log_in(guesser, key="wrong")
                if by_form
                else await guesser.get("/console", headers={"x-api-key": "no"})
            )
            assert answer.status_code == 401
        for answer in (
            await log_in(guesser),
            await guesser.get("/console", headers={"x-api-key": ADMIN_KEY}),
        ):
            assert answer.status_code == 429
            assert 0 < int(answer.headers["retry-after"]) <= SECONDS_PER_TRY
            assert "set-cookie" not in answer.headers
        assert (await log_in(other)).status_code == 303
        rig.clock.advance_ms(SECONDS_PER_TRY * 1e3)
        assert (await log_in(guesser)).status_code == 303


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_form_of_another_site_is_not_looked_at(stranger: httpx.AsyncClient, site: str) -> None:
    answer = await stranger.post("/console/login", data={"key": ADMIN_KEY}, headers={"sec-fetch-site": site})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


async def test_a_link_on_another_site_leads_through_a_page_of_our_own_so_that_the_cookie_comes_along(
    stranger: httpx.AsyncClient,
) -> None:
    path = "/console/requests/req_1?lang=en&x=%22%3E"
    answer = await stranger.get(path, headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 200
    (refresh,) = Page(answer).all("meta", http_equiv="refresh")
    assert refresh["content"] == f"0; url={path}"
    assert "the-secret-model" not in answer.text


async def test_no_answer_is_kept_framed_or_allowed_to_load_anything(
    rig: ConsoleRig, stranger: httpx.AsyncClient
) -> None:
    client = await rig.logged_in()
    answers = [
        await stranger.get("/console"),
        await stranger.get("/console/login"),
        await client.get("/console"),
        await client.get("/console/requests/req_1"),
        await client.get("/console/requests/nobody"),
        await client.get("/console/requests/req_1?format=json"),
    ]
    for answer in answers:
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        if answer.headers.get("content-type", "").startswith("text/html") and answer.content:
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; ")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("path", ["/console", "/console/requests/req_1"])
async def test_a_page_can_only_be_read(rig: ConsoleRig, path: str) -> None:
    client = await rig.logged_in()
    for method in ("POST", "PUT", "DELETE"):
        assert (await client.request(method, path)).status_code == 405


async def test_the_consoles_session_does_not_open_the_admin_api(rig: ConsoleRig) -> None:
    client = await rig.logged_in()
    assert (await client.get("/admin/v1/requests/req_1")).status_code == 401
