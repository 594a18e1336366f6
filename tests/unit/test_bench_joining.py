"""What a load test learns after its requests have ended: the gateway's stages, and tokens that usage did not tell."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ledgers import STREAM_STAGES_MS, WALL_NS, numbered
from store_rig import Rig, row

from cli.bench_options import ask_server_of, asked_of
from cli.errors import CliError
from loadtest import server_side
from loadtest.archive import columns
from loadtest.endpoint import NotAnswered
from loadtest.record import Record
from loadtest.server_side import NotJoined, ServerSide, client_link_ms, join_server, stages_ms
from loadtest.session import token_counts
from loadtest.settings import BenchSettings
from loadtest.stream import StreamReader
from loadtest.tokenizer import LocalTokenizer, count_answers
from protocol.ids import LOAD_TEST_PREFIX
from protocol.timings import Timings
from settings.errors import SettingsError
from tracing.observer.samples import live_view, sample_of
from tracing.observer.store import AddRow
from tracing.observer.window_rows import WindowRows

MS = 1_000_000


def records(count: int) -> list[Record]:
    """Requests that a gateway answered: 100 ms from sending to the first token."""
    return [
        Record(0, sent_ns=5 * MS, first_token_ns=105 * MS, end_ns=200 * MS, gateway_id=f"req_{number}", usage_tokens=3)
        for number in range(count)
    ]


def known(ids: Sequence[str]) -> dict[str, Any]:
    stages = {"auth": 1.0, "engine_prefill": 90.0}
    return {
        one: {"upstream": "engine", "size": "le_256", "ttft_ms": 91.0, "stages_ms": stages, "new": 1} for one in ids
    }


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "PAUSE_S", 0.0)


async def test_every_request_gets_its_stages_and_the_rest_is_the_clients_link():
    asked = records(1203)
    sizes: list[int] = []

    def ask(ids: Sequence[str]) -> dict[str, Any]:
        sizes.append(len(ids))
        return known(ids)

    assert await join_server(asked, ask) == []
    assert sizes == [500, 500, 203]
    assert {one.server.upstream for one in asked if one.server} == {"engine"}
    assert stages_ms(asked[0]) == {"auth": 1.0, "engine_prefill": 90.0, "client_link": pytest.approx(9.0)}
    kept = columns(asked, 0, lambda _record: 0)
    assert kept["client_link_ms"][7] == pytest.approx(9.0)
    assert kept["server_ttft_ms"][1202] == 91.0
    asked[0].retries = 1
    assert client_link_ms(asked[0]) is None


async def test_a_request_that_is_not_known_yet_is_asked_for_again_and_then_told():
    asked = records(3)
    times = 0

    def ask(ids: Sequence[str]) -> dict[str, Any]:
        nonlocal times
        times += 1
        return known([one for one in ids if one == "req_0" or (one == "req_1" and times > 2)])

    (note,) = await join_server(asked, ask)
    assert "did not know 1 of 3" in note
    assert [one.server is not None for one in asked] == [True, True, False]


async def test_where_it_cannot_be_joined_the_reason_is_told_and_the_engines_own_times_stay():
    def refuse(ids: Sequence[str]) -> dict[str, Any]:
        raise NotJoined("no admin key")

    asked = records(1)
    asked[0].timings = Timings(queue_ms=4.0, prompt_ms=90.0)
    assert await join_server(asked, refuse) == ["the gateway's stages are not joined: no admin key"]
    assert "knows none" in (await join_server(asked, lambda ids: {}))[0]
    assert "no version of ours" in (await join_server(asked, lambda ids: {"req_0": {"size": 1}}))[0]
    assert stages_ms(asked[0]) == {"engine_queue": 4.0, "engine_prefill": 90.0}
    assert "not asked for" in (await join_server(asked, None))[0]


async def test_an_endpoint_that_is_no_gateway_of_ours_is_never_asked():
    def fail(ids: Sequence[str]) -> dict[str, Any]:
        raise AssertionError(ids)

    foreign = Record(0, request_id="chatcmpl-1")
    assert await join_server([foreign], fail) == []
    assert columns([foreign], 0, lambda _record: 0)["engine_queue_ms"] == [None]


def test_the_store_gives_many_by_name_queued_or_written_and_live_traffic_without_load_tests(tmp_path):
    rig = Rig(tmp_path / "traces.db")
    for number in range(1100):
        name = f"{LOAD_TEST_PREFIX}r-{number}" if number % 2 else None
        rig.store.put(AddRow(row(numbered(number, client_request_id=name))))
        if number == 1000:
            assert rig.store.flush()
    found = {one.ledger.request_id for one in rig.store.named([f"req_{n}" for n in (0, 1, 999, 1099)] + ["req_x", "'"])}
    assert rig.store.flush()
    assert found == {"req_1", "req_999", "req_1099"} | ({"req_0"} & found)
    rows = WindowRows(tmp_path / "traces.db", since_ns=WALL_NS - 10**12, model="m", with_load_tests=False)
    rows.read()
    view = live_view(rows)
    rig.store.close()
    assert view["requests"] + view["load_tests_left_out"] == 1000
    assert view["load_tests_left_out"] == 500
    assert len(view["samples"]) == 500
    assert view["samples"][0]["stages_ms"]["engine_queue"] == STREAM_STAGES_MS["engine_queue"]


def test_a_sample_is_what_a_load_test_can_read():
    sample = sample_of(row(numbered(1)))
    read = msgspec.convert(sample, ServerSide)
    assert (read.upstream, read.upstream_model, read.size) == ("engine", "m-upstream", "le_256")
    assert (read.computed_tokens, read.mean_batch, read.engine_running) == (31, 4.0, 3)
    assert read.ttft_ms == pytest.approx(sum(STREAM_STAGES_MS.values()))


def answer(record: Record, *events: str, usage: str = "") -> Record:
    reader = StreamReader(record)
    for number, delta in enumerate(events):
        assert reader.feed(b'data: {"choices": [{"delta": %s}]}\n\n' % delta.encode(), number * MS) is None
    tail = b"data: [DONE]\n\n"
    assert reader.feed(usage.encode() + tail, 10 * MS) is None
    assert reader.end(10 * MS) is None
    record.end_ns = 11 * MS
    return record


class Words:
    name = "the words"

    async def of_chat(self, text: str) -> int:
        return len(text.split())

    of_text = of_chat


async def test_tokens_without_usage_are_counted_by_tokenizer_and_it_is_said():
    spoken = answer(Record(0), '{"reasoning_content": "one two "}', '{"content": "three four five"}')
    told = answer(
        Record(0), '{"content": "a b c"}', usage='data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n'
    )
    called = answer(Record(0), '{"tool_calls": [{"index": 0}]}', '{"content": "a b c d"}')
    assert (spoken.output_tokens, called.output_tokens) == (2, 2)
    await count_answers([spoken, told, called], Words())
    assert (spoken.output_tokens, told.output_tokens, called.output_tokens) == (5, 7, 2)
    assert spoken.text is told.text is called.text is None
    said = token_counts([spoken, spoken, told, called])
    assert said == "the words, but usage in 1 of 4 requests, but events in 1 of 4 requests"


async def test_a_server_without_tokenizer_leaves_tokens_counted_by_events():
    class Nothing(Words):
        async def of_text(self, text: str) -> int:
            raise NotAnswered("404")

    spoken = [answer(Record(0), '{"content": "a b"}') for _ in range(20)]
    await count_answers(spoken, Nothing())
    assert {one.output_tokens for one in spoken} == {1}
    assert token_counts(spoken) == "events"


class OneOfTheirs:
    """Counts words; its template adds three."""

    chat_template = "yes"

    @staticmethod
    def from_pretrained(source: str) -> OneOfTheirs:
        if source != "here":
            raise OSError(f"{source} is not there\nand more")
        return OneOfTheirs()

    def apply_chat_template(self, chat: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert (add_generation_prompt, tokenize) == (True, False)
        return f"<user> {chat[0]['content']} </user> <assistant>"

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[str]]:
        return {"input_ids": ["<begin>"] * add_special_tokens + text.split()}


async def test_a_tokenizer_at_hand_counts_with_its_template_and_one_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=OneOfTheirs))
    here = LocalTokenizer("here")
    assert (here.name, await here.of_chat("a b"), await here.of_text("a b")) == ("the tokenizer here", 5, 2)
    with pytest.raises(SettingsError, match=r"workload.tokenizer = 'gone': can't be loaded: gone is not there$"):
        LocalTokenizer("gone")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SettingsError, match="needs transformers"):
        LocalTokenizer("here")


def test_an_ops_listener_that_cannot_be_asked_is_no_error_of_the_run(monkeypatch):
    def refuse(url: str | None, config: None) -> None:
        raise CliError(f"{url}: no admin key")

    monkeypatch.setattr("cli.ops.ops_client", refuse)
    ask = ask_server_of("http://ops")
    with pytest.raises(NotJoined, match="http://ops: no admin key"):
        ask(["req_1"])


def test_the_engines_page_is_looked_for_where_the_ops_listener_is_configured(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENLINE_API_KEY", "sk-tl-test")
    monkeypatch.setenv("TOKENLINE_SERVER__OPS_PORT", "19464")
    settings = BenchSettings()
    assert asked_of(settings, None, (64, 1024), None).ops_url == "http://127.0.0.1:19464"
    assert asked_of(settings, None, (64, 1024), None, ops_url="http://h:1").ops_url == "http://h:1"
    (tmp_path / "tokenline.toml").write_text("nonsense")
    assert asked_of(settings, None, (64, 1024), None).ops_url is None
