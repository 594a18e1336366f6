"""The doctor at addresses, keys, proxies, certificates and gateways that are wrong in one way each."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import time
from email.utils import formatdate

import pytest
from aiohttp import web
from doctor_rig import (
    KEY,
    QUICK,
    Handler,
    Server,
    buffering,
    counted,
    doctor,
    listening,
    page,
    plain_text,
    refusal,
    said,
    streamed,
)  # fmt: skip
from gateway_rig import KEY as GATEWAY_KEY
from gateway_rig import rig, stream, whole


async def test_a_server_without_a_fault_gets_a_clean_bill() -> None:
    async with Server().serving() as server:
        seen = await doctor(f"{server.origin}/v1")
    assert seen.troubles == []
    expected = {
        "base_url": "url_well_formed", "key": "key_well_formed", "proxy": "proxy_none", "dns": "dns_not_needed",
        "connect": "connected", "tls": "tls_none", "path": "path_answers", "auth": "auth_accepted",
        "model": "model_only_one", "answer": "answer_came", "stream": "stream_came", "buffering": "events_apart",
        "clock": "clock_agrees", "gateway": "gateway_other",
    }  # fmt: skip
    assert {check: seen.codes(check) for check in expected} == {check: [code] for check, code in expected.items()}
    assert seen["stream_came"].values["events"] == 48
    assert set(server.keys) == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("place", "code", "right"),
    [
        ("", "path_too_short", "/v1"),
        ("/api", "path_too_long", "/v1"),
        ("/v1/openai", "path_too_long", "/v1"),
        ("/openai/v2", "path_too_long", "/v1"),
    ],
)
async def test_a_base_url_beside_the_api_is_put_right_and_the_rest_looked_at(place: str, code: str, right: str) -> None:
    async with Server().serving() as server:
        server.stream = streamed(*QUICK)
        seen = await doctor(server.origin + place)
        assert seen[code].values["right"] == server.origin + right
        assert seen.report.used_base_url == server.origin + right
    assert seen.codes("answer") == ["answer_came"]


@pytest.mark.parametrize(
    ("models", "code", "words"),
    [
        (page(), "path_html", "Log in"),
        (page(502, "502 Bad Gateway"), "path_server_error", "502 Bad Gateway"),
        (refusal(401, f"the key {KEY} is wrong", "unknown_key"), "auth_refused", "the key … is wrong"),
        (refusal(403, "not yours"), "auth_forbidden", "not yours"),
        (refusal(429, "too many", **{"retry-after": "7"}), "auth_limited", "7"),
        (refusal(503, "loading"), "server_failed", "loading"),
        (plain_text, "path_unsure", "/v1"),
        (said({"data": []}), "model_none_listed", ""),
    ],
)
async def test_what_answers_in_place_of_a_list_of_models_is_named(models: Handler, code: str, words: str) -> None:
    async with Server().serving() as server:
        server.models = models
        seen = await doctor(f"{server.origin}/v1")
    assert seen.troubles == [code]
    assert words in repr(seen[code].values)
    assert not any("chat" in asked for asked in server.asked)


async def test_a_redirect_is_followed_by_the_doctor_alone() -> None:
    async with Server().serving() as server:

        async def moved(request: web.Request) -> web.StreamResponse:
            return web.Response(status=301, headers={"location": request.path.replace("/old", "/v1")})

        server.elsewhere, server.stream = moved, streamed(*QUICK)
        seen = await doctor(f"{server.origin}/old")
        assert seen.troubles == ["path_redirects"]
        assert seen["path_redirects"].values["right"] == f"{server.origin}/v1"
    assert seen.codes("answer") == ["answer_came"]


async def test_headers_that_are_no_text_are_told_as_far_as_they_are() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\x9b2J\r\nserver: \xff\r\ncontent-length: 0\r\n\r\n"
        )
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        seen = await doctor(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    assert seen.troubles == ["path_redirects"]
    repr(seen["path_redirects"].values).encode()


async def test_a_key_is_not_taken_along_to_another_host() -> None:
    async with Server().serving() as other, Server().serving() as server:

        async def moved(_request: web.Request) -> web.StreamResponse:
            raise web.HTTPFound(other.origin.replace("127.0.0.1", "localhost") + "/v1/models")

        server.models = moved
        seen = await doctor(f"{server.origin}/v1")
    assert seen.troubles == ["path_redirects"]
    assert other.keys == []


@pytest.mark.parametrize(
    ("model", "listed", "troubles", "values"),
    [
        ("m", ["m", "n"], [], {}),
        ("M", ["m", "n"], ["model_near"], {"near": "m"}),
        ("gpt-9", ["m", "n"], ["model_not_listed"], {"names": "m, n"}),
        (None, ["m", "n"], [], {}),
    ],
)
async def test_a_model_is_looked_up_and_the_nearest_suggested(
    model: str | None, listed: list[str], troubles: list[str], values: dict[str, str]
) -> None:
    async with Server().serving() as server:
        server.models = said({"data": [{"id": name} for name in listed]})
        server.stream = streamed(*QUICK)
        if troubles:
            server.whole = refusal(404, "The model does not exist", "model_not_found")
        seen = await doctor(f"{server.origin}/v1", model=model)
    assert seen.troubles == troubles
    assert [values.items() <= seen[code].values.items() for code in troubles] == [True] * len(troubles)
    assert seen.codes("model") != ["model_choose"] or seen.codes("answer") == ["after"]


async def test_an_alias_that_is_not_listed_and_works_is_told_as_such() -> None:
    async with Server().serving() as server:
        server.stream = streamed(*QUICK)
        seen = await doctor(f"{server.origin}/v1", model="alias")
    assert seen.troubles == ["model_unlisted_works"]


async def test_without_a_list_the_named_model_is_asked() -> None:
    async with Server().serving() as server:
        server.models, server.stream = server.not_found, streamed(*QUICK)
        seen = await doctor(f"{server.origin}/v1", model="m")
        assert seen.troubles == []
        assert seen.codes("path") == ["path_no_list", "path_answers_chat"]
        seen = await doctor(f"{server.origin}/v7", model="m")
    assert seen.troubles == ["path_unknown"]


@pytest.mark.parametrize(("seconds", "code"), [(3600, "clock_ahead"), (-3600, "clock_behind")])
async def test_a_clock_that_is_off_is_told(seconds: float, code: str) -> None:
    async with Server().serving() as server:
        server.models = said({"data": []}, Date=formatdate(time.time() + seconds, usegmt=True))
        seen = await doctor(f"{server.origin}/v1")
    assert seen[code].values["seconds"] == pytest.approx(3600, abs=3)


async def test_a_key_that_was_repaired_is_sent_repaired_and_none_is_missed_where_none_is_needed() -> None:
    async with Server().serving() as server:
        server.stream = streamed(*QUICK)
        seen = await doctor(f"{server.origin}/v1", key=f"{KEY}\n")
        assert (seen.troubles, set(server.keys)) == (["key_white_space"], {f"Bearer {KEY}"})
        seen = await doctor(f"{server.origin}/v1", key="")
        assert (seen.troubles, seen.codes("key")) == ([], ["key_not_needed"])
        server.models = refusal(401, "no key")
        seen = await doctor(f"{server.origin}/v1", key="")
        assert (seen.troubles, seen.codes("auth")) == (["key_empty"], ["after"])


async def test_a_proxy_that_is_gone_is_named_without_its_password_and_gone_around(free_port: int) -> None:
    gone = f"http://me:secret@127.0.0.1:{free_port}"
    async with Server().serving() as server:
        server.stream = streamed(*QUICK)
        for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            seen = await doctor(f"{server.origin}/v1", **{variable: gone})
            assert seen.troubles == ["proxy_refused"]
            assert seen["proxy_refused"].values["proxy"] == f"http://…@127.0.0.1:{free_port}"
            assert seen.codes("answer") == ["answer_came"]
        seen = await doctor(f"{server.origin}/v1", HTTP_PROXY=gone, NO_PROXY="localhost,127.0.0.1")
        assert seen.troubles == ["proxy_dead_unused"]
        seen = await doctor(f"{server.origin}/v1", HTTPS_PROXY=gone)
        assert seen.troubles == []
        for entry in ("127.0.0.0/8", "127.*", "http://127.0.0.1"):
            seen = await doctor(f"{server.origin}/v1", HTTP_PROXY=gone, NO_PROXY=f"localhost, {entry}")
            assert seen.troubles == ["no_proxy_unread", "proxy_refused"]
            assert seen["no_proxy_unread"].values["entry"] == entry
        seen = await doctor(f"{server.origin}/v1", http_proxy=gone, HTTP_PROXY="http://other:1")
        assert seen.troubles == ["proxy_two_values", "proxy_refused"]
        seen = await doctor(f"{server.origin}/v1", HTTP_PROXY="socks://127.0.0.1:1")
    assert seen.troubles == ["proxy_bad_url"]


async def test_a_proxy_is_gone_through_as_clients_do_and_its_buffering_found() -> None:
    async with Server().serving() as server, listening(buffering) as proxy:
        seen = await doctor(f"{server.origin}/v1", HTTP_PROXY=proxy)
        assert seen.troubles == ["proxy_for_local", "events_held_back"]
        assert seen["events_held_back"].values["server"].endswith("1.1 squid")
        seen = await doctor(f"{server.origin}/v1", all_proxy=proxy.replace("http:", "socks5:"))
    assert seen.troubles == ["proxy_socks"]


async def test_a_proxy_that_answers_by_itself_is_told_from_the_server() -> None:
    async with Server().serving() as server, listening(page(503, "No such host")) as proxy:
        server.stream = streamed(*QUICK)
        seen = await doctor(f"{server.origin}/v1", HTTP_PROXY=proxy)
    assert seen.troubles == ["proxy_for_local", "proxy_spoils"]
    assert seen["proxy_spoils"].values["seen"] == "503 No such host"
    assert seen.codes("answer") == ["answer_came"]


async def test_nobody_there_is_told_from_no_such_name(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await doctor(f"http://127.0.0.1:{free_port}/api")).troubles == ["connect_refused"]

    def unknown(*_arguments: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    seen = await doctor("http://gatway:8080/api")
    assert seen.troubles == ["dns_failed"]
    assert set(seen.codes("tls") + seen.codes("answer")) == {"after"}


async def test_https_and_http_are_told_apart_and_a_key_never_leaves_over_tls_that_is_not_trusted(tmp_path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert], check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with Server().serving(context) as server:
        assert (await doctor(f"{server.origin}/v1")).troubles == ["tls_self_signed"]
        seen = await doctor(f"{server.origin}/v1".replace("https", "http"))
        assert seen["tls_expected"].values["right"] == f"{server.origin}/v1"
        assert server.keys == []
    async with Server().serving() as server:
        server.stream = streamed(*QUICK)
        seen = await doctor(f"{server.origin}/v1".replace("http", "https"))
    assert seen.troubles == ["tls_plain_server"]
    assert seen.codes("answer") == ["answer_came"]


@pytest.mark.parametrize("surface", ["openai", "anthropic"])
async def test_our_gateway_is_known_and_tells_more(tmp_path, surface: str) -> None:
    async with rig(tmp_path) as gateway:
        base_url = f"{gateway.origin}/api"

        async def answer(request: web.Request) -> web.StreamResponse:
            fields = json.loads(gateway.upstream.bodies[-1])
            if not fields.get("stream"):
                choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
                return await whole({"choices": [choice]})(request)
            return await stream(*counted(20, 0.004))(request)

        gateway.upstream.script = answer
        seen = await doctor(base_url, key=GATEWAY_KEY, surface=surface, model="m")
        assert seen.troubles == []
        assert seen.report.is_tokenline
        assert seen.codes("buffering") == ["events_apart"]
        assert seen.report.request_id in [ledger.request_id for ledger in await gateway.observer.closed(3)]
        assert "gateway_queue" in seen["gateway_tokenline_timed"].values["stages"]
        seen = await doctor(gateway.origin, key=GATEWAY_KEY, surface=surface, model="m")
        wrong = [] if surface == "anthropic" else ["path_too_short"]
        assert seen.troubles == wrong
        assert [seen[code].values["right"] for code in wrong] == [base_url for _ in wrong]
        seen = await doctor(base_url, key="sk-tl-nobodys", surface=surface, model="m")
        assert seen.troubles == ["auth_refused"]


async def test_tokenline_s_other_ports_are_known(shared) -> None:
    server = shared.settings.server
    for port, code in ((server.ops_port, "path_ops_port"), (server.otlp_port, "path_otlp_port")):
        seen = await doctor(f"http://127.0.0.1:{port}/api")
        assert seen.troubles == [code]
