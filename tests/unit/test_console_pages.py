"""The console's pages: the numbers of the JSON, nothing that a stranger wrote run, help where nothing is found."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from console_rig import ConsoleRig, Page
from ledgers import attempt, numbered, timings, whole

from tracing.clock import host_identity
from tracing.ledger import Ledger, Outcome, Usage
from tracing.spans import Span

HOSTILE = "<img src=x onerror=alert(1)>\"'`{{7*7}}{%x%}</script><script>alert(2)</script>"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ConsoleRig]:
    made = ConsoleRig(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def client(rig: ConsoleRig) -> AsyncIterator[httpx.AsyncClient]:
    client = await rig.logged_in()
    yield client
    await client.aclose()


def here(number: int, **changes: Any) -> Ledger:
    return numbered(number, **{"timings": timings(host_identity()), **changes})


async def page_of(client: httpx.AsyncClient, path: str, status: int = 200) -> Page:
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    return Page(answer)


async def json_of(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    answer = await client.get(f"/console/requests/{request_id}?format=json")
    (record,) = answer.json()["matches"]
    found: dict[str, Any] = record
    return found


def numbers_of(page: Page) -> list[float]:
    """What the cells of the charts give in full."""
    cells = page.all("td", class_="number")
    return [float(cell["title"].removesuffix(" ms")) for cell in cells if "title" in cell]


async def test_the_page_shows_the_numbers_of_the_json(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    rig.close_request(here(1, client_request_id="my-own-17", key_alias="shop", team="web"))
    record, page = await json_of(client, "req_1"), await page_of(client, "/console/requests/req_1")
    assert numbers_of(page) == [
        *record["stages"].values(),
        record["unaccounted_ms"],
        record["total_ms"],
        *record["after"].values(),
    ]
    assert [value["title"] for value in page.all("p", class_="value")] == ["81.5 ms", "2.0 ms", "186.0 ms"]
    for words in (
        *("req_1", "my-own-17", record["trace_id"], "shop", "web", "ok", "status 200", "chat, stream"),
        *("First token written to the client less ingress", "(last token − first token) / (output tokens − 1)"),
        *("Last byte handed to the client's connection less ingress", "engine_prefill", "largest", "55.2 %"),
        *(record["verdict"]["text"], "Compare it with its neighbours:", record["verdict"]["cause"]),
        *("running 3", "waiting 1", "25.0 %", "input 31", "output 51", "the upstream's own count (usage)"),
        *("tokenline why req_1", "first_token_written 81.500", "engine_scheduled 30.500", "request_sent 9.000"),
        *("llm_request", "derived", "7 emitted, 5 derived"),
    ):
        assert words in page.text, words
    for name in record["stages"]:
        assert page.all("span", class_="stage", title=page_title(name)), name
    answer = await client.get("/console/requests/req_1")
    assert "<code>tokenline slow</code>, <code>tokenline why --window 1h</code>." in answer.text
    assert "`" not in page.text


def page_title(stage: str) -> str:
    from tracing.stages import DESCRIPTIONS

    return DESCRIPTIONS[stage]


async def test_the_clients_connection_is_shown_beside_the_engine(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    rig.close_request(
        here(
            1, client_rtt_ns=12_340_000, client_network_ns=-5_000_000, backpressure_ns=7_000_000, loop_lag_ns=1_500_000
        ),
        here(2, unsent_bytes=123_456),
    )
    page = await page_of(client, "/console/requests/req_1")
    for words in ("round trip (TCP) 12.34 ms", "sent to seen (two clocks) -5.00 ms", "not taken at once 7.00 ms"):
        assert words in page.text, words
    assert "event loop late by 1.50 ms" in page.text
    page = await page_of(client, "/console/requests/req_2")
    assert "bytes unsent at the end 123,456" in page.text
    assert "round trip" not in page.text


async def test_every_bar_has_words(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    rig.close_request(here(1))
    page = await page_of(client, "/console/requests/req_1")
    charts = [one for one in page.all("svg") if one.get("aria-hidden") != "true"]
    assert len(charts) > 20
    assert all(one["role"] == "img" and one["aria-label"] for one in charts)
    assert "begins at 30.50 ms, lasts 45.00 ms" in {one["aria-label"] for one in charts}


async def test_the_baseline_is_shown_once_there_is_one(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    rig.close_request(here(1))
    young = await page_of(client, "/console/requests/req_1")
    assert "Requests of this class so far: 1." in young.text
    assert "Over the usual" not in young.text
    rig.close_request(*(here(number) for number in range(2, 42)))
    slow = timings(host_identity(), scheduled=330.5, prefill_end=375.5, first_written=377.0, last_token=475.5)
    late = {"first_event": 379.0, "first_token": 380.0, "first_visible": 380.0, "first_token_written": 381.5}
    rig.close_request(here(50, timings=slow, **late, last_token=480.0, upstream_end=485.0, finish=486.0))
    record, page = await json_of(client, "req_50"), await page_of(client, "/console/requests/req_50")
    assert record["baseline"]["compared_with"] == "class"
    ranges = page.all("svg", class_="range")
    usual = record["baseline"]["stages"]["engine_queue"]
    expected = f"318.00 ms; P50 {usual['p50_ms']:.2f}, P95 {usual['p95_ms']:.2f}, P99 {usual['p99_ms']:.2f}"
    assert expected in {one["aria-label"] for one in ranges}
    assert len(ranges) >= len(record["stages"])
    assert "over P99" in page.text
    assert "Over the usual" in page.text
    assert record["verdict"]["cause"] in page.text
    assert f"+{record['verdict']['excess'][0]['ms']:,.2f}" in page.text


@pytest.mark.parametrize(
    "missing", [{}, {"verdict": None, "baseline": None}, {"verdict": {"cause": "unknown"}, "baseline": {}}]
)
async def test_a_record_without_verdict_or_baseline_is_shown_all_the_same(
    rig: ConsoleRig, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, missing: dict[str, Any]
) -> None:
    from dashboards.console import routes

    rig.close_request(here(1))
    asked = routes.requests_with_id

    async def without(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        found = await asked(*arguments, **options)
        return [
            {name: value for name, value in one.items() if name not in ("verdict", "baseline")} | missing
            for one in found
        ]

    monkeypatch.setattr(routes, "requests_with_id", without)
    page = await page_of(client, "/console/requests/req_1")
    assert "engine_prefill" in page.text
    assert "no baseline yet" in page.text


async def test_each_attempt_is_shown_with_its_own_marks_and_error(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    never = dict.fromkeys(("connected", "request_sent", "upstream_headers", "upstream_first_byte"))
    tries = [attempt(1, upstream="vllm-a", status=0, error="connect", end=5.9, **never), attempt(2, upstream="vllm-b")]
    rig.close_request(here(1, attempts=tries, timings=None))
    page = await page_of(client, "/console/requests/req_1")
    for words in ("1. vllm-a connect", "2. vllm-b answered", "end 5.900", "request_sent 9.000", "failed_attempts"):
        assert words in page.text, words
    assert "This upstream reported nothing of its inside." in page.text


async def test_requests_that_ended_early_have_a_page(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    nothing = dict.fromkeys(
        ("authenticated", "body_read", "routed", "admitted", "first_event", "first_token", "first_visible")
    )
    nothing |= dict.fromkeys(("first_token_written", "last_token", "upstream_end"))
    refused = here(
        1, attempts=[], timings=None, usage=Usage(), stream=False, outcome=Outcome.AUTH_ERROR, status=401, **nothing
    )
    cancelled = here(2, outcome=Outcome.CLIENT_CANCELLED, client_gone=60.0, last_token=None, finish=None)
    rig.close_request(refused, cancelled, whole(request_id="req_3", timings=None))
    page = await page_of(client, "/console/requests/req_1")
    assert "auth_error" in page.text
    assert "The request never reached an upstream." in page.text
    page = await page_of(client, "/console/requests/req_2")
    assert "client_cancelled" in page.text
    assert "client_gone 60.000" in page.text
    page = await page_of(client, "/console/requests/req_3")
    assert "A whole answer has none; its total time is E2E." in page.text
    assert "Stages to the end" in page.text


def hostile_request(number: int) -> Ledger:
    """Every text that came from outside is hostile."""
    tries = [
        attempt(1, upstream=HOSTILE, error=HOSTILE, upstream_request_id=HOSTILE, server_timing=HOSTILE),
        attempt(2),
    ]
    tries[0].model = HOSTILE
    return here(
        number,
        attempts=tries,
        **dict.fromkeys(
            ("client_request_id", "model", "upstream", "surface", "key_alias", "team", "error_code", "finish_reason",
             "path", "method", "tracestate"), HOSTILE
        ),
        usage=Usage(input_tokens=31, output_tokens=51, source=HOSTILE),
    )  # fmt: skip


def assert_harmless(answer: httpx.Response) -> None:
    """What was written by others is text, and what runs is ours."""
    page = Page(answer)
    (nonce,) = set(re.findall(r"'nonce-([^']+)'", answer.headers["content-security-policy"]))
    assert not page.all("img")
    for tag in ("script", "style"):
        assert all(one == {"nonce": nonce} for one in page.all(tag))
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        for name in ("href", "src", "action"):
            target = attributes.get(name, "/console")
            assert target.startswith(("/console", "#", "data:image/svg+xml,%3Csvg")), (tag, target)
    assert "49" not in re.findall(r"onerror[^<]{0,40}", page.text)
    assert HOSTILE not in answer.text


async def test_what_strangers_wrote_is_shown_as_text_and_never_runs(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    made = hostile_request(1)
    rig.close_request(made)
    answered_by = made.attempts[-1].span_id
    span = Span(made.trace_id, "ab" * 8, HOSTILE, made.wall_ns, made.wall_ns + 1_000, answered_by,
                attributes={HOSTILE: HOSTILE}, resource={"service.name": HOSTILE}, scope=HOSTILE)  # fmt: skip
    rig.observer.take_spans([span])
    for path in ("/console", "/console/requests/req_1", "/console/requests/req_1?lang=zh"):
        answer = await client.get(path)
        assert answer.status_code == 200
        assert_harmless(answer)
        assert " ".join(HOSTILE.split()) in Page(answer).text
    answer = await client.get("/console/requests", params={"id": HOSTILE})
    assert answer.headers["location"].startswith("/console/requests/%3Cimg")
    assert_harmless(await client.get(answer.headers["location"]))


@pytest.mark.parametrize(
    "path",
    [f"/console/requests/{HOSTILE.replace('?', '')}x", "/console?window=<script>", "/console?lang=<script>",
     "/console/<b>", "/console/requests/%00%0d%0aset-cookie:x", "/console/requests/" + "x" * 5_000,
     "/console/requests/%ff%fe", "/console/login?next=\"><script>alert(1)</script>"],
)  # fmt: skip
async def test_hostile_addresses_get_harmless_pages(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code in (200, 303, 404)
    assert "set-cookie" not in answer.headers
    if answer.headers.get("content-type", "").startswith("text/html"):
        assert_harmless(answer)


async def test_two_pages_never_share_a_nonce(client: httpx.AsyncClient) -> None:
    policies = {(await client.get("/console")).headers["content-security-policy"] for _ in range(3)}
    assert len(policies) == 3


async def test_the_start_page_lists_the_slowest_and_the_latest_with_links(
    rig: ConsoleRig, client: httpx.AsyncClient
) -> None:
    empty = await page_of(client, "/console")
    assert "No request has ended yet" in empty.text
    assert rig.settings.advertised_base_url in empty.text
    now_ns = rig.clock.wall_ns()
    for number in range(30):
        rig.close_request(here(number, wall_ns=now_ns - (30 - number) * 10**9, first_token_written=81.5 + number))
    rig.close_request(here(99, wall_ns=now_ns - 2 * 3_600 * 10**9, first_token_written=170.0))
    page = await page_of(client, "/console")
    links = [one["href"] for one in page.all("a") if "/requests/" in one["href"]]
    slowest = [f"/console/requests/req_{number}" for number in range(29, 9, -1)]
    assert links[:20] == slowest
    assert links[20] == "/console/requests/req_29"
    assert len(links) == 40
    assert "TTFT 110.5 ms" in page.text
    assert "engine_prefill" in page.text
    day = await page_of(client, "/console?window=24h")
    assert next(one["href"] for one in day.all("a") if "/requests/" in one["href"]) == "/console/requests/req_99"
    assert day.all("a", aria_current="page") == [{"href": "/console?window=24h", "aria-current": "page"}]
    misread = await page_of(client, "/console?window=soon")
    assert "The window soon is not understood" in misread.text


@pytest.mark.parametrize("kind", ["request_id", "client_request_id", "trace_id", "traceparent"])
async def test_the_search_box_finds_any_kind_of_id(rig: ConsoleRig, client: httpx.AsyncClient, kind: str) -> None:
    made = here(1, client_request_id="my own/№17?&x")
    rig.close_request(made)
    ids = {**msgspec.structs.asdict(made), "traceparent": f"00-{made.trace_id}-{made.span_id}-01"}
    answer = await client.get("/console/requests", params={"id": f"  {ids[kind]} "})
    assert answer.status_code == 303
    assert "engine_prefill" in (await page_of(client, answer.headers["location"])).text


async def test_several_requests_with_one_id_are_listed_and_the_one_that_we_named_comes_first(
    rig: ConsoleRig, client: httpx.AsyncClient
) -> None:
    rig.close_request(*(here(number, client_request_id="same", model=f"model-{number}") for number in (1, 2, 3)))
    page = await page_of(client, "/console/requests/same")
    assert "Requests with the id same: 3" in page.text
    assert {"/console/requests/req_1", "/console/requests/req_2", "/console/requests/req_3"} <= {
        one["href"] for one in page.all("a")
    }
    rig.close_request(here(4, client_request_id="req_1", model="impostor"))
    page = await page_of(client, "/console/requests/req_1")
    assert "model-1" in page.text
    assert "impostor" not in page.text
    assert "Other requests with this id: 1." in page.text
    (others,) = [one["href"] for one in page.all("a") if "all=1" in one["href"]]
    assert "impostor" in (await page_of(client, others)).text


async def test_an_unknown_id_gets_help_and_a_404(client: httpx.AsyncClient) -> None:
    page = await page_of(client, "/console/requests/nobody", 404)
    for words in (
        "No request nobody is known here",
        "200,000",
        "tracing.store_max_rows",
        "may still run",
        "x-request-id",
    ):
        assert words in page.text, words
    assert [one["value"] for one in page.all("input", name="id")] == ["nobody"]
    assert "There is no such page" in (await page_of(client, "/console/elsewhere", 404)).text


async def test_the_language_is_asked_for_and_kept_in_links(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    rig.close_request(here(1))
    page = await page_of(client, "/console?lang=zh")
    assert page.all("html", lang="zh-Hans")
    assert "最慢的请求" in page.text
    assert {"/console/requests/req_1?lang=zh", "/console?lang=zh&window=24h"} <= {one["href"] for one in page.all("a")}
    page = await page_of(client, "/console/requests/req_1?lang=zh")
    english = await page_of(client, "/console/requests/req_1")
    assert "到首个 token 的各阶段" in page.text
    assert page.all("a", hreflang="en")[0]["href"] == "/console/requests/req_1?lang=en"
    verdicts = [(await client.get(f"/console/requests/req_1?format=json&lang={one}")).json() for one in ("zh", "en")]
    for shown, told in zip((page, english), verdicts, strict=True):
        assert told["matches"][0]["verdict"]["text"] in shown.text
    answer = await client.get("/console", headers={"accept-language": "zh-CN,zh;q=0.9"})
    assert "最慢的请求" in answer.text


async def test_the_json_is_the_admin_apis(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    from console_rig import ADMIN_KEY

    rig.close_request(here(1))
    ours = await client.get("/console/requests/req_1?format=json")
    theirs = await client.get("/admin/v1/requests/req_1?spans=1", headers={"x-api-key": ADMIN_KEY})
    assert ours.json() == theirs.json()


async def test_a_page_of_a_thousand_spans_is_cut_and_quick(rig: ConsoleRig, client: httpx.AsyncClient) -> None:
    made = here(1)
    rig.close_request(made)
    parent = made.attempts[-1].span_id
    spans = [
        Span(made.trace_id, f"{n:016x}", f"step {n}", made.wall_ns, made.wall_ns + n, parent) for n in range(1, 101)
    ]
    spans += [
        Span(made.trace_id, f"{n:016x}", "x", made.wall_ns, made.wall_ns + 1, f"{n - 1:016x}")
        for n in range(101, 1_001)
    ]
    rig.observer.take_spans(spans)
    answer = await client.get("/console/requests/req_1")
    assert len(answer.content) < 400_000
    assert re.search(r"The first 200 of \d+ spans", Page(answer).text)
