"""What the doctor reads out of settings and instants alone, and its words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

import loadtest.doctor
from cli.doctor_show import as_builtins, lines_of
from loadtest.doctor import chinese, english
from loadtest.doctor.address import read_base_url
from loadtest.doctor.answering import near_names
from loadtest.doctor.finding import CHECKS, Report, fail, ok, skip, warn
from loadtest.doctor.given import given_by, masked
from loadtest.doctor.leftovers import check_credentials
from loadtest.doctor.proxies import is_bypassed, is_local, proxies_of, read_proxy
from loadtest.doctor.secret import read_key
from loadtest.doctor.spacing import judge, spacing_of
from loadtest.doctor.texts import words_of
from loadtest.endpoint import fingerprint

LOCAL = "http://127.0.0.1:8080/api"
KEY = "sk-tl-abcdefgh12345678"


def given(surface: str = "openai", *, base_url: str | None = None, key_env: str | None = None, **environ: str):
    return given_by(surface, base_url, key_env, None, environ)


def codes(findings) -> list[str]:
    return [finding.code for finding in findings]


@pytest.mark.parametrize(
    ("text", "surface", "repaired", "found"),
    [
        (LOCAL, "openai", LOCAL, ["url_well_formed"]),
        ("https://api.example.com:8443/v1", "openai", "https://api.example.com:8443/v1", ["url_well_formed"]),
        ("http://[::1]:8080/api", "openai", "http://[::1]:8080/api", ["url_well_formed"]),
        ("http://h:8000", "openai", "http://h:8000", ["url_well_formed"]),
        ("http://h:8000/", "openai", "http://h:8000", ["url_well_formed"]),
        (f" {LOCAL}\n", "openai", LOCAL, ["url_white_space"]),
        (f"\ufeff{LOCAL}", "openai", LOCAL, ["url_white_space"]),
        ("http://127.0.0.1: 8080/api", "openai", LOCAL, ["url_white_space"]),
        (f'"{LOCAL}"', "openai", LOCAL, ["url_quoted"]),
        (f"{LOCAL}/", "openai", LOCAL, ["url_trailing_slash"]),
        (f"{LOCAL}///", "openai", LOCAL, ["url_trailing_slash"]),
        ("http://h//api", "openai", "http://h/api", ["url_double_slash"]),
        ("http://h/v1/chat/completions", "openai", "http://h/v1", ["url_whole_path"]),
        ("http://h/api/v1/chat/completions/", "openai", "http://h/api/v1", ["url_trailing_slash", "url_whole_path"]),
        ("http://h/v1/responses", "openai", "http://h/v1", ["url_whole_path"]),
        ("http://h/v1/models", "openai", "http://h/v1", ["url_whole_path"]),
        ("http://h/chat/completions/chat/completions", "openai", "http://h", ["url_whole_path"]),
        ("http://h/v1/v1", "openai", "http://h/v1", ["url_repeated"]),
        ("http://h/api/v1/v1", "openai", "http://h/api/v1", ["url_repeated"]),
        ("http://h/api/v1/api/v1", "openai", "http://h/api/v1", ["url_repeated"]),
        ("http://h/api", "anthropic", "http://h/api", ["url_well_formed"]),
        ("http://h/api/v1", "anthropic", "http://h/api", ["url_v1_for_anthropic"]),
        ("http://h/v1/messages", "anthropic", "http://h", ["url_whole_path"]),
        ("127.0.0.1:8080/api", "openai", LOCAL, ["url_no_scheme"]),
        ("localhost:8080", "openai", "http://localhost:8080", ["url_no_scheme"]),
        ("example.com:443/v1", "openai", "https://example.com:443/v1", ["url_no_scheme"]),
        ("http:/127.0.0.1:8080/api", "openai", LOCAL, ["url_no_scheme"]),
        ("https//example.com/v1", "openai", "https://example.com/v1", ["url_no_scheme"]),
        ("ws://h/v1", "openai", "", ["url_bad_scheme"]),
        ("htp://h/v1", "openai", "", ["url_bad_scheme"]),
        ("http://h:80800/v1", "openai", "", ["url_bad_host"]),
        ("http://h:port/v1", "openai", "", ["url_bad_host"]),
        ("http:///v1", "openai", "", ["url_bad_host"]),
        ("http://[::1/v1", "openai", "", ["url_bad_host"]),
        ("http://u:p@h/v1", "openai", "http://h/v1", ["url_has_credentials"]),
        ("http://h/v1?key=x", "openai", "http://h/v1", ["url_has_query"]),
        ("http://h/v1#x", "openai", "http://h/v1", ["url_has_query"]),
        ("http://0.0.0.0:8080/api", "openai", LOCAL, ["url_listen_address"]),
        ("http://[::]:8080/api", "openai", "http://[::1]:8080/api", ["url_listen_address"]),
        ("http://${HOST}:8080/api", "openai", "", ["url_unexpanded"]),
        ("$BASE_URL", "openai", "", ["url_unexpanded"]),
        ("", "openai", "", ["url_empty"]),
        ("  ", "openai", "", ["url_empty"]),
        ('""', "openai", "", ["url_empty"]),
    ],
)
def test_a_base_url_is_repaired_and_its_slip_named(text, surface, repaired, found):
    url, findings = read_base_url(text, surface)
    assert (url, codes(findings)) == (repaired, found)


@pytest.mark.parametrize(
    ("text", "key", "found"),
    [
        (KEY, KEY, ["key_well_formed"]),
        ("any-key", "any-key", ["key_well_formed"]),
        (f"{KEY}\n", KEY, ["key_white_space"]),
        (f" {KEY}", KEY, ["key_white_space"]),
        (f"\ufeff{KEY}", KEY, ["key_white_space"]),
        (f"{KEY}\u200b", KEY, ["key_white_space"]),
        (f'"{KEY}"', KEY, ["key_quoted"]),
        (f"'{KEY}\n'", KEY, ["key_white_space", "key_quoted"]),
        (f"“{KEY}”", KEY, ["key_quoted"]),
        (f"Bearer {KEY}", KEY, ["key_has_scheme"]),
        (f"Authorization: Bearer {KEY}", KEY, ["key_has_scheme"]),
        (f"{KEY[:8]}\n{KEY[8:]}", KEY, ["key_space_inside"]),
        (f"{KEY[:8]}\\n{KEY[8:]}", KEY, ["key_space_inside"]),
        ("$OPENAI_API_KEY", "", ["key_unexpanded"]),
        ("${TOKENLINE_API_KEY}", "", ["key_unexpanded"]),
        ("sk-tl-…", "", ["key_placeholder"]),
        ("sk-xxxx", "", ["key_placeholder"]),
        ("<your key>", "", ["key_placeholder"]),
        ("your-api-key", "", ["key_placeholder"]),
        ("密钥", "", ["key_not_ascii"]),
        ("  ", "", ["key_empty"]),
    ],
)
def test_a_key_is_repaired_and_its_slip_named(text, key, found):
    asked = given(key_env="K", K=text)
    repaired, findings = read_key(asked)
    assert (repaired, codes(findings)) == (key, found)
    assert KEY not in repr(findings)


def test_a_missing_key_is_told_from_one_that_is_not_wanted():
    assert codes(read_key(given())[1]) == ["key_none"]
    assert codes(read_key(given(key_env="K"))[1]) == ["key_empty"]
    assert codes(read_key(given_by("openai", None, None, None, {"OPENAI_API_KEY": KEY}, no_key=True))[1]) == [
        "key_not_wanted"
    ]


@pytest.mark.parametrize(
    ("surface", "environ", "url_from", "key_from", "as_bearer"),
    [
        ("openai", {}, "", "", True),
        ("openai", {"OPENAI_BASE_URL": "http://a", "OPENAI_API_KEY": "k"}, "OPENAI_BASE_URL", "OPENAI_API_KEY", True),
        ("openai", {"OPENAI_API_KEY": " ", "TOKENLINE_API_KEY": "k"}, "", "TOKENLINE_API_KEY", True),
        ("anthropic", {"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k"}, "", "ANTHROPIC_API_KEY", False),
        (
            "anthropic",
            {"ANTHROPIC_BASE_URL": "http://a", "ANTHROPIC_AUTH_TOKEN": "k", "ANTHROPIC_API_KEY": "k"},
            "ANTHROPIC_BASE_URL",
            "ANTHROPIC_AUTH_TOKEN",
            True,
        ),
    ],
)
def test_settings_are_read_where_the_sdk_reads_them(surface, environ, url_from, key_from, as_bearer):
    found = given(surface, **environ)
    assert (found.base_url_from, found.key_from, found.key_as_bearer) == (url_from, key_from, as_bearer)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (given(OPENAI_API_KEY=KEY), ["credentials_agree"]),
        (given("anthropic", ANTHROPIC_API_KEY="a", ANTHROPIC_AUTH_TOKEN="b"), ["two_credentials"]),
        (given("anthropic", ANTHROPIC_API_KEY="a", ANTHROPIC_AUTH_TOKEN="a"), ["credentials_agree"]),
        (given("anthropic", ANTHROPIC_API_KEY="", ANTHROPIC_AUTH_TOKEN="a"), ["credentials_agree"]),
        (given(ANTHROPIC_API_KEY="a", ANTHROPIC_AUTH_TOKEN="b"), ["two_credentials"]),
        (given(key_env="K", K="mine", OPENAI_API_KEY="other"), ["other_key"]),
        (given(key_env="K", K="mine", OPENAI_API_KEY="mine"), ["credentials_agree"]),
        (given(base_url="http://a/v1", OPENAI_BASE_URL="http://b/v1"), ["other_base_url"]),
        (given(base_url="http://a/v1", OPENAI_BASE_URL="http://a/v1/"), ["credentials_agree"]),
        (given(OPENAI_BASE_URL="http://a/v1", OPENAI_API_BASE="http://b/v1"), ["other_base_url"]),
        (given("anthropic", OPENAI_BASE_URL="http://b/v1"), ["credentials_agree"]),
    ],
)
def test_settings_that_contradict_one_another_are_named(asked, found):
    assert codes(check_credentials(asked)) == found


def test_two_credentials_break_anthropics_clients_and_only_threaten_others():
    both = {"ANTHROPIC_API_KEY": "a", "ANTHROPIC_AUTH_TOKEN": "b"}
    assert check_credentials(given("anthropic", **both))[0].result == "fail"
    assert check_credentials(given(**both))[0].result == "warn"


@pytest.mark.parametrize(
    ("host", "no_proxy", "bypassed"),
    [
        ("127.0.0.1", "127.0.0.1,localhost", True),
        ("127.0.0.1", "localhost", False),
        ("127.0.0.1", "127.0.0.0/8", False),
        ("127.0.0.1", "127.0.0.1:8080", True),
        ("127.0.0.1", "127.0.0.1:9", False),
        ("127.0.0.1", "*", True),
        ("::1", "[::1]", True),
        ("a.example.com", " example.com ", True),
        ("a.example.com", ".EXAMPLE.com", True),
        ("notexample.com", "example.com", False),
        ("a", "", False),
    ],
)
def test_no_proxy_is_read_as_clients_read_it(host, no_proxy, bypassed):
    assert is_bypassed(host, 8080, proxies_of({"NO_PROXY": no_proxy})) is bypassed


def test_proxy_variables_are_read_in_both_cases_and_never_shown_with_their_password():
    found = proxies_of({"http_proxy": "http://low:1", "HTTP_PROXY": "http://up:1", "ALL_PROXY": "socks5://x:1080"})
    assert found == {"http": ("http_proxy", "http://low:1"), "all": ("ALL_PROXY", "socks5://x:1080")}
    proxy = read_proxy("HTTP_PROXY", "http://me:secret@127.0.0.1:7890")
    assert (proxy.host, proxy.port, proxy.shown) == ("127.0.0.1", 7890, "http://…@127.0.0.1:7890")
    assert read_proxy("HTTP_PROXY", "127.0.0.1:7890").port == 7890
    assert [read_proxy("HTTP_PROXY", bad) for bad in ("socks://h:1", "http://h:x", "http://")] == [None] * 3


def test_only_names_and_addresses_of_the_outside_are_not_local():
    assert [is_local(host) for host in ("127.0.0.1", "10.0.0.5", "localhost", "gateway", "a.internal")] == [True] * 5
    assert [is_local(host) for host in ("8.8.8.8", "api.example.com")] == [False] * 2


def arrivals(*ms: float) -> list[int]:
    return [round(1e6 * at) for at in ms]


STEADY = [100 + 20 * number for number in range(40)]
AT_ONCE = [900 + 0.05 * number for number in range(40)]
PIECES = [100 + 200 * (number // 10) + 0.1 * (number % 10) for number in range(40)]
JITTER = [100 + 20 * number + 9 * (number % 3) for number in range(40)]
FAST = [30 + 2 * number for number in range(40)]
LATE = [5000 + 8 * number for number in range(40)]


@pytest.mark.parametrize(
    ("ms", "decode_ms", "lag_ms", "shorter", "verdict"),
    [
        (STEADY, None, 1, None, "apart"),
        (JITTER, None, 1, None, "apart"),
        (FAST, None, 1, None, "apart"),
        (LATE, None, 1, None, "apart"),
        (AT_ONCE, 780, 1, None, "buffered"),
        (AT_ONCE, 3, 1, None, "too_fast"),
        (AT_ONCE, None, 1, None, "ask_shorter"),
        (AT_ONCE, None, 1, [300 + 0.05 * n for n in range(10)], "buffered"),
        (AT_ONCE, None, 1, [895 + 0.05 * n for n in range(10)], "too_fast"),
        (AT_ONCE, None, 1, AT_ONCE, "too_fast"),
        (AT_ONCE, None, 1, [], "too_fast"),
        (AT_ONCE, 780, 800, None, "busy"),
        (PIECES, None, 1, None, "in_pieces"),
        (PIECES, 780, 1, None, "in_pieces"),
        (PIECES, None, 190, None, "busy"),
        (STEADY[:7], None, 1, None, "too_few"),
        ([], None, 0, None, "too_few"),
    ],
)
def test_the_rhythm_of_a_stream_tells_who_held_it_back(ms, decode_ms, lag_ms, shorter, verdict):
    other = None if shorter is None else spacing_of(0, arrivals(*shorter))
    assert judge(spacing_of(0, arrivals(*ms)), decode_ms, lag_ms, shorter=other) == verdict


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("SmolLM2", ["smollm2"]),
        ("smolm2", ["smollm2"]),
        ("llama-3.1-8b-instruct", ["meta-llama/Llama-3.1-8B-Instruct"]),
        ("gpt-4o", []),
    ],
)
def test_names_that_were_probably_meant_are_found(asked, near):
    assert near_names(asked, ["smollm2", "meta-llama/Llama-3.1-8B-Instruct"]) == near


def test_masking_takes_out_keys_and_passwords():
    assert masked(f"the key {KEY} at http://a:b@h/", "") == "the key sk-… at http://…@h/"
    assert masked("the key plainword was wrong", "plainword") == "the key … was wrong"
    assert masked("Send 'Authorization: Bearer sk-tl-...'") == "Send 'Authorization: Bearer sk-tl-...'"


def used_codes() -> set[str]:
    """Every code that a finding is made with in the source, where it is written out."""
    found = set()
    for file in Path(loadtest.doctor.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("ok", "warn", "fail", "skip", "judged"):
                check, code = node.args[:2]
                strings = [leaf.value for leaf in ast.walk(code) if isinstance(leaf, ast.Constant)]
                if isinstance(check, ast.Constant):
                    assert check.value in CHECKS, check.value
                found |= {
                    string for string in strings if isinstance(string, str) and re.fullmatch(r"[a-z_0-9]+", string)
                }
    return found - {"spacing_", "model"}


def test_every_finding_has_words_in_both_languages_with_the_same_places():
    used = used_codes()
    assert len(used) > 90
    assert used <= set(english.TEXTS)
    assert set(english.TEXTS) == set(chinese.TEXTS)
    for code, texts in english.TEXTS.items():
        places = [set(re.findall(r"\{(\w+)[}:]", text)) for text in texts]
        assert [set(re.findall(r"\{(\w+)[}:]", text)) for text in chinese.TEXTS[code]] == places, code
        assert bool(texts[1]) == bool(chinese.TEXTS[code][1]), code


def test_every_check_and_code_is_in_the_page_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    missing = [name for name in (*CHECKS, *english.TEXTS) if f"`{name}`" not in page]
    assert not missing


REPORT = Report(
    surface="openai",
    base_url=LOCAL,
    base_url_from="default",
    used_base_url=LOCAL,
    key_fingerprint=fingerprint(KEY),
    key_from="OPENAI_API_KEY",
    model="m",
    request_id="req_1",
    is_tokenline=True,
    findings=[
        fail("key", "key_white_space", name="OPENAI_API_KEY", what="line_end"),
        warn("path", "path_tolerated", right=LOCAL),
        ok("answer", "answer_came", ms=12),
        skip("stream", "after", other="answer"),
        skip("buffering", "after", other="answer"),
        fail("auth", "auth_refused", said="no \x1b[31m", error="unknown_key"),
    ],
)


def test_the_json_has_words_beside_codes_and_counts():
    found = as_builtins(REPORT, "en")
    assert (found["ok"], found["counts"]) == (False, {"ok": 1, "warn": 1, "fail": 2, "skip": 2})
    assert found["findings"][0] == {
        "check": "key",
        "result": "fail",
        "code": "key_white_space",
        "values": {"name": "OPENAI_API_KEY", "what": "line_end"},
        "seen": "The key in OPENAI_API_KEY begins or ends with a line end.",
        "fix": words_of(REPORT.findings[0], "en")[1],
    }
    assert "tr -d" in found["findings"][0]["fix"]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("cells", [60, 80, 120])
def test_the_page_fits_its_width_and_holds_nothing_that_a_terminal_obeys(language, cells):
    page = [line.plain for line in lines_of(REPORT, language, cells=cells)]
    assert [line for line in page if cell_len(line) > cells] == []
    assert "\x1b" not in "".join(page)
    assert sum("stream, buffering" in line for line in page) == 1
