"""What a load test makes of its records: tallies, health, comparisons, the archive."""

from __future__ import annotations

import json
import os
import random
import re
import stat
from array import array
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtest.archive import NoRun, columns, find_run, new_run_id, read_run, save_run
from loadtest.bootstrap import independent, resampled
from loadtest.charts import charts_of
from loadtest.compare import compare, foreign, moved, other_settings
from loadtest.driver import Progress
from loadtest.fail_on import broken, parse_rule
from loadtest.figures import quantile, spread
from loadtest.health import health
from loadtest.monitor import Monitor
from loadtest.picture import NoPictures, save_pictures
from loadtest.reading import remarks
from loadtest.record import Fault, Record
from loadtest.report import report
from loadtest.session import explained, token_counts
from loadtest.settings import Metrics
from loadtest.stages import Stage, Window
from loadtest.tally import tally, within
from protocol.timings import Timings
from settings.errors import SettingsError
from tracing.clock import FakeClock

S = 1_000_000_000
MS = 1_000_000
WINDOW = Window(0, 10 * S, 20 * S)


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.bootstrap.RESAMPLES", 500)


def record(
    at_s: float, *, ttft_ms: float = 100, tpot_ms: float = 10, tokens: int = 5, events: int | None = None, **more: Any
) -> Record:
    """A good request with even gaps."""
    due = round(at_s * S)
    first = due + round(ttft_ms * MS)
    count = tokens if events is None else events
    last = first + round(tpot_ms * (tokens - 1) * MS)
    step = (last - first) // max(1, count - 1)
    times = array("q", [first + n * step for n in range(count)])
    return Record(
        due, sent_ns=due + MS, first_byte_ns=first, first_token_ns=first, last_token_ns=last, end_ns=last + MS,
        usage_tokens=tokens, prompt_tokens=64, token_events=times, **more,
    )  # fmt: skip


def tallied(records: list[Record], window: Window = WINDOW, slo: dict[str, float] | None = None) -> dict[str, Any]:
    monitor = Monitor(Progress(), FakeClock(), 500, None)
    return tally(
        Stage(2, 20, 10), window, records, monitor, slo or {}, is_stream=True, collect=Metrics()
    )  # fmt: skip


def test_quantiles_are_interpolated_and_of_one_value_are_that_value():
    assert quantile([1, 2, 3, 4, 5], 0.5) == 3
    assert quantile([0, 10], 0.95) == pytest.approx(9.5)
    assert quantile([7], 0.99) == 7
    assert spread([None, 3.0, 1.0])["count"] == 2
    assert spread([])["p99"] is None


def test_latencies_are_of_requests_due_in_the_window_and_tokens_of_those_that_came_in_it():
    early = record(9.9, ttft_ms=300, tpot_ms=100, tokens=4)
    late = record(19.9, ttft_ms=50, tpot_ms=100, tokens=4)
    stage = tallied([early, record(12), late])
    assert stage["requests"] == 2
    assert stage["ttft_ms"]["count"] == 2
    assert stage["ttft_ms"]["max"] == 100
    # 4 of the early one, 5 of the middle one, 1 of the late one (at 19.95 s).
    assert stage["tps"] == pytest.approx((4 + 5 + 1) / 10)
    assert stage["rps"] == pytest.approx(0.2)
    assert stage["tpot_ms"]["max"] == pytest.approx(100)


def test_tokens_of_events_with_several_are_shared_out_and_tpot_divides_by_tokens():
    stage = tallied([record(12, tokens=9, events=3, tpot_ms=10)])
    assert stage["tps"] == pytest.approx(0.9)
    assert stage["tpot_ms"]["p50"] == pytest.approx(10)
    assert stage["gap_ms"]["p50"] == pytest.approx(40)


def test_failures_give_no_latency_but_are_counted_and_miss_every_objective():
    failed = record(13)
    failed.fault = Fault("timeout", "before the first token")
    slow = record(14, ttft_ms=900)
    stage = tallied([record(12), failed, slow], slo={"ttft": 500})
    assert stage["errors"] == 1
    assert stage["errors_by_kind"] == {"timeout": 1}
    assert stage["ttft_ms"]["count"] == 2
    assert stage["goodput"]["rps"] == pytest.approx(0.1)
    assert stage["goodput"]["share"] == pytest.approx(1 / 3, rel=1e-5)


def test_both_latencies_are_told():
    late = record(12, ttft_ms=800)
    late.sent_ns = late.scheduled_ns + 600 * MS
    stage = tallied([late])
    assert stage["ttft_ms"]["p50"] == pytest.approx(800)
    assert stage["ttft_from_sent_ms"]["p50"] == pytest.approx(200)
    assert stage["client"]["sent_late_ms"]["max"] == pytest.approx(600)


def test_where_token_counts_come_from_is_said():
    counted, guessed = record(1), record(2)
    guessed.usage_tokens = None
    assert token_counts([counted]) == "usage"
    assert token_counts([guessed]) == "events"
    assert token_counts([counted, guessed]) == "usage, but events in 1 of 2 requests"
    guessed.fault = Fault("timeout", "x")
    assert explained([counted, guessed])[0]["example"] == "x"


@pytest.mark.parametrize(
    ("p99", "count", "result"),
    [(300, 50, "pass"), (301, 50, "watch"), (500, 50, "watch"), (501, 50, "fail"), (900, 19, "unknown")],
)
def test_health_allows_a_p99_ttft_of_three_to_five_times_p50(p99, count, result):
    stage = {
        "group": "short", "requests": count, "errors": 0,
        "ttft_ms": {"count": count, "p50": 100.0, "p99": float(p99)},
        "tpot_ms": {"count": count, "p50": 10.0, "p99": 99.0},
    }  # fmt: skip
    found = health(stage)
    assert [rule.result for rule in found] == [result, "pass" if count >= 20 else "unknown", "pass"]
    stage["tpot_ms"]["p99"], stage["errors"] = 100.0, 1
    assert [rule.result for rule in health(stage)][1:] == ["fail" if count >= 20 else "unknown", "fail"]


def run(seed: int, *, ttft_ms: float = 200, queue_ms: float = 50, count: int = 300, **more: Any) -> dict[str, Any]:
    """An archived run: TTFT spread by 10 %, of which the queue is a part."""
    rng = random.Random(seed)
    records = []
    for number in range(count):
        extra = rng.gauss(0, 0.05) * ttft_ms
        timings = Timings(queue_ms=queue_ms + extra, prompt_ms=100.0, tokenize_ms=1.0 + rng.random(), predicted_ms=40.0)
        records.append(record(number * 20 / count, ttft_ms=ttft_ms + extra, tpot_ms=10 + rng.random(), timings=timings))
    window = Window(0, 0, 20 * S)
    return {
        "format": 1, "run": f"r{seed}", "base_url": "http://h/v1", "key_fingerprint": "k", "model": "m", "mix": [],
        "settings": {"workload": {"prompt_tokens": 64}},
        "stages": [{**within(window, 0), **tallied(records, window)}],
        "timeline": {"tps": [75.0 + rng.random() for _ in range(20)]},
        "requests": columns(records, 0, lambda _record: 0), **more,
    }  # fmt: skip


def test_two_equal_runs_show_no_difference():
    for seed in range(4):
        differences = compare(run(seed), run(seed + 100), random.Random(1))
        assert not [found for found in differences if found.is_sure]
        assert {found.verdict for found in differences} <= {"no difference", "not sure"}


def test_a_slower_run_is_found_with_its_interval_and_the_stage_that_moved():
    differences = compare(run(1), run(2, ttft_ms=260, queue_ms=110), random.Random(1))
    found = {difference.metric: difference for difference in differences}
    ttft = found["ttft_p50"]
    assert ttft.verdict == "worse"
    assert ttft.low is not None
    assert ttft.high is not None
    assert ttft.low < 60 < ttft.high
    assert ttft.share == pytest.approx(0.3, abs=0.05)
    assert found["tpot_p50"].verdict == "no difference"
    assert {stage: d.metric for stage, d in moved(differences).items()} == {"2 in flight": "engine_queue_p50"}
    back = {d.metric: d for d in compare(run(2, ttft_ms=260, queue_ms=110), run(1), random.Random(1))}
    assert back["ttft_p50"].verdict == "better"


def test_the_resampled_quantile_is_distributed_as_that_of_real_resamples():
    rng = random.Random(1)
    ordered = sorted(rng.expovariate(1) for _ in range(80))
    quick = sorted(resampled(ordered, 0.95, rng) for _ in range(4000))
    real = sorted(quantile(sorted(rng.choices(ordered, k=80)), 0.95) for _ in range(4000))
    for share in (0.1, 0.5, 0.9):
        assert quantile(quick, share) == pytest.approx(quantile(real, share), rel=0.15)


def test_requests_that_share_their_luck_are_worth_fewer():
    rng = random.Random(4)
    alone = [(n * S // 1000, rng.random()) for n in range(2000)]
    assert independent(alone, 0.5, S // 100) > 1000
    waves = [(n * S // 1000, wave + rng.random() / 10) for wave in [rng.random() for _ in range(40)] for n in range(50)]
    waves = [(block * S + at, value) for (at, value), block in zip(waves, [n // 50 for n in range(2000)], strict=True)]
    assert 20 < independent(waves, quantile(sorted(v for _, v in waves), 0.5), S) < 80
    assert independent(alone, 0.5, 10 * S) == 1
    assert independent(alone, 2.0, S // 100) == 2000


def test_one_bad_moment_makes_no_run_surely_worse():
    """One wave of ten was slow as a whole: P99 lies in it, and so does all that P99 is of."""

    def hiccup(seed: int, slow_wave: int | None) -> dict[str, Any]:
        kept = run(seed)
        for at, due in enumerate(kept["requests"]["scheduled_us"]):
            wave = int((due or 0) // 2e6)
            kept["requests"]["end_us"][at] += 2_000_000
            if wave == slow_wave:
                kept["requests"]["first_token_us"][at] += 60_000
        return kept

    found = {d.metric: d for d in compare(hiccup(1, 4), hiccup(2, None), random.Random(1))}
    assert found["ttft_p99"].verdict == "not sure"
    assert found["ttft_p50"].verdict in ("no difference", "not sure")


def test_two_runs_whose_waves_are_lucky_and_unlucky_are_not_surely_different():
    """Those that are due together wait for the same thing: a few waves, not hundreds of requests."""

    def waved(seed: int) -> dict[str, Any]:
        kept, rng = run(seed), random.Random(seed)
        requests = kept["requests"]
        luck = [rng.choice((0, 40_000)) for _ in range(10)]
        for at, due in enumerate(requests["scheduled_us"]):
            if due is None:
                continue
            requests["first_token_us"][at] += luck[int(due // 2e6) % 10]
            requests["end_us"][at] += luck[int(due // 2e6) % 10] + 2_000_000
        return kept

    sure = [[d for d in compare(waved(s), waved(s + 50), random.Random(1)) if d.is_sure] for s in range(6)]
    assert sum(any(d.metric == "ttft_p50" for d in found) for found in sure) <= 1


def test_a_limit_is_broken_by_a_sure_difference_beyond_it_alone():
    differences = compare(run(1), run(2, ttft_ms=260, queue_ms=110), random.Random(1))
    assert [rule.text for rule, _ in broken([parse_rule("ttft_p50>+10%")], differences)] == ["ttft_p50>+10%"]
    assert broken([parse_rule("ttft_p50>+20ms")], differences)
    assert not broken([parse_rule("ttft_p50>+45%"), parse_rule("ttft_p50<-5%"), parse_rule("tps<-5%")], differences)
    equal = compare(run(1), run(3), random.Random(1))
    assert not broken(
        [parse_rule("ttft_p99>-50%")], [d for d in equal if d.low is not None and d.low <= 0 <= (d.high or 0)]
    )
    for wrong in ("ttft>10%", "ttft_p99>10", "speed_p50>1%", "tps<-5ms", ""):
        with pytest.raises(SettingsError, match="--fail-on"):
            parse_rule(wrong)


def test_runs_of_another_key_model_or_base_url_are_flagged():
    assert not foreign(run(1), run(2))
    assert foreign(run(1), run(2, key_fingerprint="j", model="n")) == ["key_fingerprint: k and j", "model: m and n"]
    changed = run(2, settings={"workload": {"prompt_tokens": 65}})
    assert other_settings(run(1), changed) == ["workload.prompt_tokens: 64 and 65"]


def test_a_run_is_kept_for_its_owner_and_found_by_any_of_its_names(tmp_path):
    ids = [new_run_id(1_800_000_000_000_000_000 + n * 60 * S) for n in range(2)]
    for name in ids:
        file = save_run(tmp_path / "runs", {**run(1), "run": name})
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    folder = tmp_path / "runs"
    assert find_run(folder, "last").stem == ids[1]
    assert find_run(folder, ids[0]).stem == find_run(folder, ids[0][:-1]).stem == ids[0]
    assert read_run(find_run(folder, str(file)))["run"] == ids[1]
    for name in ("2027", "nothing", "/no/such.json"):
        with pytest.raises(NoRun):
            find_run(folder, name)
    (folder / "broken.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(NoRun, match="is not a run"):
        read_run(folder / "broken.json")


def reported(**more: Any) -> dict[str, Any]:
    """A run as a report reads it, with the same stage at two levels of load."""
    kept = run(1)
    busier = {**kept["stages"][0], "concurrency": 8}
    return kept | {
        "kind": "run", "started_unix_ms": 1_800_000_000_000, "prompt_lengths": "exact", "token_counts": "usage",
        "stopped": None, "notes": [], "samples": [{"at_ms": 500, "in_flight": 2, "busy": 0.5}],
        "explained": [], "stages": [kept["stages"][0], busier],
        "timeline": {"seconds": 1.0, "tps": [75.0] * 20}, **more,
    }  # fmt: skip


def test_a_report_is_one_page_with_sound_charts_and_no_script():
    page = report(reported())
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 12
    for drawn in charts:
        ElementTree.fromstring(drawn)  # noqa: S314
    for title in ("TTFT against load", "Where the first token", "TTFT against the length", "Throughput over time"):
        assert title in page
    assert "device busy" in page
    assert "300" in page  # answers of that many requests
    assert not re.search(r"<script|(?:src|href)=|https?://(?!h/v1|www.w3.org/2000/svg)|nan\b", page)


def test_a_report_says_where_a_server_is_full_and_what_the_time_goes_to():
    kept = reported()
    calm, busier = kept["stages"]
    full = {**busier, "tps": calm["tps"] * 1.05, "ttft_ms": {**busier["ttft_ms"], "p50": 900.0, "p99": 5000.0}}
    full |= {"errors": 1, "engine": {"busy": 0.4, "kv_usage": 0.9}, "goodput": {"slo_ms": {}, "rps": 1, "share": 0.5}}
    said = {one.text: one.mood for one in remarks({**kept, "stages": [calm, full]})}
    text = " ".join(said)
    assert "it is full; more load only waits" in text
    assert f"1 of {2 * calm['requests']} requests failed" in text
    assert "P99 TTFT is 5.6 times P50" in text
    assert "of the mean TTFT is engine_prefill" in text
    assert "busy only 40%" in text
    assert "90% of the KV cache" in text
    assert [mood for one, mood in said.items() if "only" in one or "cache" in one] == ["watch"] * 3
    assert {one.mood for one in remarks({**kept, "stages": [calm]})} <= {"good", "plain"}


def test_every_chart_becomes_a_picture_with_letters(tmp_path, monkeypatch):
    some = {
        name: chart for name, chart in charts_of(reported()).items() if name in ("ttft-by-load", "busy", "gpu-memory")
    }
    monkeypatch.setattr("loadtest.picture.charts_of", lambda run: some)
    files = save_pictures(reported(), tmp_path, "r")
    # One without data is no picture.
    assert [file.name for file in files] == ["r-ttft-by-load.png", "r-busy.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 3000 for file in files)


def test_without_fonts_there_are_no_pictures_and_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("loadtest.picture.picture", lambda svg: b"blank")
    with pytest.raises(NoPictures, match="no font is installed"):
        save_pictures(reported(), tmp_path, "r")


def test_what_a_server_said_is_text_in_a_report_and_never_markup():
    evil = "<img src=x onerror=alert(1)>"
    entry = {"kind": "not_sse", "what": "error", "count": 3, "meaning": "m", "example": evil}
    page = report(reported(model=evil, notes=[evil], explained=[entry], stopped=evil))
    assert "<img" not in page
    assert page.count("&lt;img") == 5


def test_a_run_in_which_nothing_succeeded_can_be_reported():
    failed = record(1)
    failed.fault = Fault("timeout", "x")
    empty = reported(
        stages=[{**within(WINDOW, 0), **tallied([])}], requests=columns([failed], 0, lambda _record: 0), samples=[]
    )
    page = report(empty)
    assert "No request was due in the part that counts." in page
    assert 'id="ttft' not in page


def tails(ttfts: list[float], prompts: list[int] | None = None, at: list[float] | None = None) -> dict[str, Any] | None:
    records = []
    for number, ttft in enumerate(ttfts):
        one = record(at[number] if at else 10 + number * 10 / len(ttfts), ttft_ms=ttft)
        one.prompt_tokens = prompts[number] if prompts else 64
        records.append(one)
    found: dict[str, Any] | None = tallied(records)["tail"]
    return found


def test_a_tail_is_laid_to_what_it_goes_with():
    rng = random.Random(2)
    lengths = [rng.choice([50, 60, 70, 80, 2000]) if n % 5 == 0 else rng.randint(50, 80) for n in range(200)]
    by_length = tails([100 + length * 2 + rng.random() for length in lengths], lengths)
    assert by_length is not None
    assert "prompt's length" in by_length["verdict"]
    bursts = [10 + n * 0.25 for n in range(30)] + [18 + n * 0.005 for n in range(30)]
    by_load = tails([100.0 + n / 1000 for n in range(30)] + [100.0 + 40 * n for n in range(30)], None, bursts)
    assert by_load is not None
    assert "in flight" in by_load["verdict"]
    by_time = tails([2000.0 if 100 <= n < 112 else 100 + rng.random() for n in range(200)])
    assert by_time is not None
    assert "a time window: 1 s from second" in by_time["verdict"]
    scattered = tails([2000.0 if n % 18 == 0 else 100 + rng.random() for n in range(200)])
    assert scattered is not None
    assert "neither" in scattered["verdict"]
    assert tails([100 + rng.random() for _ in range(200)]) is None
    assert tails([100.0, 2000.0]) is None
