"""What a load test is asked for: its settings, stages, schedules and prompts."""

from __future__ import annotations

import itertools
import json
import math
import random
import resource
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as trying
from hypothesis import strategies as st

from loadtest.arrivals import arrivals
from loadtest.calibration import WORDS, Lexicon, calibrate
from loadtest.endpoint import fingerprint, key_of
from loadtest.limits import raise_open_files
from loadtest.settings import Api, BenchSettings, bench_settings, read_bench_settings, with_flags
from loadtest.stages import parse_stages, stage_of, windows_of
from loadtest.workload import MadePrompts, Size, parse_mix, read_prompts
from settings.errors import SettingsError

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "settings.json"


def test_the_example_loads_as_it_stands():
    settings = read_bench_settings(EXAMPLE)
    assert settings.api.base_url == "http://127.0.0.1:8080/api"
    assert settings.load_test.concurrency == 128
    assert settings.workload.prompt_tokens == 512
    assert settings.metrics.sample_interval_ms == 500
    stage = stage_of(settings.load_test)
    assert (stage.seconds, stage.counted_seconds, stage.rate) == (330, 300, 0)


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"load_test": {"concurency": 4}}, "unknown key load_test.concurency; did you mean load_test.concurrency?"),
        ({"loadtest": {}}, "did you mean load_test?"),
        ({"api": {"key": "sk-secret"}}, "unknown key api.key"),
        ({"load_test": {"concurrency": 0}}, "load_test.concurrency = 0"),
        ({"load_test": {"concurrency": "4"}}, "load_test.concurrency = '4'"),
        ({"api": {"base_url": "localhost:8080"}}, "must be like http://"),
        ({"api": {"base_url": "http://me:pw@host/v1"}}, "must not hold credentials"),
        ([], "must be a JSON object"),
    ],
)
def test_what_is_wrong_in_a_settings_file_is_named(given_, words):
    with pytest.raises(SettingsError, match=r"^settings.json: ") as raised:
        bench_settings(given_, "settings.json")
    assert words in str(raised.value)


def test_flags_win_over_the_file_and_are_checked_as_the_file_is():
    settings = read_bench_settings(EXAMPLE)
    changed = with_flags(settings, {"load_test.concurrency": 4, "api.model": None})
    assert changed.load_test.concurrency == 4
    assert changed.workload == settings.workload
    with pytest.raises(SettingsError, match=r"load_test.arrival = 'even'"):
        with_flags(settings, {"load_test.arrival": "even"})


def test_the_key_comes_from_the_environment_and_its_fingerprint_does_not_show_it():
    assert key_of(Api(api_key_env="K"), {"K": " sk-1 "}) == "sk-1"
    assert key_of(Api(api_key_env=None), {}) is None
    with pytest.raises(SettingsError, match="variable K is not set"):
        key_of(Api(api_key_env="K"), {})
    assert fingerprint("sk-1") == fingerprint("sk-1") != fingerprint("sk-2")
    assert "sk-1" not in (fingerprint("sk-1") or "")
    assert fingerprint(None) is None


def test_a_stage_counts_its_last_two_thirds_and_follows_the_one_before_at_once():
    stages = parse_stages("32:30s, 128:3m,2.5rps:600ms", 7)
    assert [(s.concurrency, s.rate, s.seconds) for s in stages] == [(32, 0, 30), (128, 0, 180), (7, 2.5, 0.6)]
    first, second, _ = windows_of(stages, 1000)
    assert first.counted_ns == 1000 + 10_000_000_000
    assert first.end_ns == second.start_ns == 1000 + 30_000_000_000
    assert second.counted_seconds == pytest.approx(120)
    assert first.counts(first.counted_ns)
    assert not first.counts(first.counted_ns - 1)
    assert not first.counts(first.end_ns)


@pytest.mark.parametrize("text", ["", "32", "32:30", "0:30s", "32:0s", "1.5:3s", "x:3s", "32:30s;64:30s"])
def test_what_is_not_a_stage_is_refused(text):
    with pytest.raises(SettingsError, match="--stages"):
        parse_stages(text, 1)


def test_constant_arrivals_never_drift_from_their_schedule():
    due = list(arrivals(500, 500 + 3_000_000_000, 3, "constant", 1.0, random.Random(1)))
    assert due == [500 + round(n * 1e9 / 3) for n in range(9)]


@pytest.mark.parametrize(
    ("arrival", "burstiness", "variation"), [("poisson", 1, 1), ("gamma", 0.25, 2), ("gamma", 4, 0.5)]
)
def test_random_arrivals_have_the_rate_and_the_burstiness_asked_for(arrival, burstiness, variation):
    due = list(arrivals(0, 2000 * 10**9, 10, arrival, burstiness, random.Random(3)))
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(1e8, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.08)


def byte_count(overhead: int):
    async def count(text: str) -> int:
        return overhead + len(text)

    return count


def word_count(overhead: int):
    async def count(text: str) -> int:
        return overhead + len(text.split())

    return count


@pytest.mark.parametrize("counter", [byte_count, word_count])
@pytest.mark.parametrize("tokens", [60, 61, 512])
async def test_made_prompts_have_exactly_the_length_asked_for_and_begin_differently(counter, tokens):
    count = counter(23)
    lexicon = await calibrate(count)
    assert lexicon.is_exact
    make = MadePrompts(lexicon, [Size("", tokens)], 0, random.Random(5))
    texts = [make().messages[0]["content"] for _ in range(20)]
    assert [await count(text) for text in texts] == [tokens] * 20
    assert len({text[:30] for text in texts}) == 20


async def test_a_shared_beginning_is_the_same_in_every_prompt():
    count = word_count(10)
    make = MadePrompts(await calibrate(count), [Size("", 100)], 40, random.Random(5))
    texts = [make().messages[0]["content"].split() for _ in range(20)]
    assert len({tuple(text[:40]) for text in texts}) == 1
    assert len({text[40:][0] + text[41] + text[42] for text in texts}) > 15
    assert {len(text) for text in texts} == {90}


async def test_a_tokenizer_whose_words_do_not_add_up_is_said_to_be_approximate():
    async def count(text: str) -> int:
        return 5 + len(text) // 3 + len(text.split()) // 7

    assert not (await calibrate(count)).is_exact


@trying(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(WORDS), st.integers(1, 9), min_size=1), st.integers(0, 200), st.integers(0, 99))
def test_words_cost_what_was_asked_from_the_least_on(costs, more, seed):
    lexicon = Lexicon(costs, 0, True, "")
    tokens = lexicon.least + more
    if tokens % math.gcd(*costs.values()):
        with pytest.raises(ValueError, match="no words cost"):
            lexicon.words(tokens, random.Random(seed))
    else:
        assert lexicon.cost_of(lexicon.words(tokens, random.Random(seed))) == tokens


async def test_a_prompt_too_short_for_the_template_is_refused():
    lexicon = await calibrate(word_count(30))
    with pytest.raises(SettingsError, match="can't be made"):
        MadePrompts(lexicon, [Size("", 20)], 0, random.Random(0))
    with pytest.raises(SettingsError, match="shared_prefix_tokens"):
        MadePrompts(lexicon, [Size("", 64)], 60, random.Random(0))


def test_a_mix_has_the_shares_asked_for():
    sizes = parse_mix("short:3,long:1", {"short": 8, "long": 80})
    make = MadePrompts(Lexicon({"a": 1, "b": 1}, 2, True, ""), sizes, 0, random.Random(1))
    made = [make() for _ in range(4000)]
    assert sum(p.group == "short" for p in made) == pytest.approx(3000, abs=120)
    assert {(p.group, p.tokens) for p in made} == {("short", 8), ("long", 80)}
    for bad in ("tall", "short,short", "short:0", ""):
        with pytest.raises(SettingsError, match="--mix"):
            parse_mix(bad, {"short": 8, "long": 80})


def test_prompts_are_read_from_jsonl_and_sharegpt(tmp_path):
    lines = [
        '"just text"',
        '{"prompt": "p", "max_tokens": 7, "group": "g"}',
        "",
        '{"messages": [{"role": "user", "content": "m"}]}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    made = read_prompts(tmp_path / "a.jsonl")
    assert [made().messages[0]["content"] for _ in range(4)] == ["just text", "p", "m", "just text"]
    assert made().max_output_tokens == 7
    talk = [{"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "hello"}]}]
    (tmp_path / "b.json").write_text(json.dumps(talk))
    assert read_prompts(tmp_path / "b.json")().messages[0] == {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no prompt"),
        ("{", "a.jsonl:1"),
        ('{"x": 1}', "a.jsonl:1: has neither"),
        ("[1", "not valid JSON"),
        ('[{"conversations": []}]', "entry 1"),
    ],
)
def test_a_file_without_prompts_is_refused_with_the_line(tmp_path, text, words):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_prompts(tmp_path / "a.jsonl")


def test_the_limit_of_open_files_is_raised_or_explained():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(256, soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        assert raise_open_files(low) is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == low + 128
        if hard != resource.RLIM_INFINITY:
            told = raise_open_files(hard)
            assert told is not None
            assert f"{hard} are allowed" in told
            assert "ulimit -Hn" in told
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        BenchSettings().api.base_url = "http://x"  # type: ignore[misc]
