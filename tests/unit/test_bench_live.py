"""A kept run against live traffic: which layer changed, and when nobody can tell."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from cli.bench_live import check_arguments, compare_with_live
from cli.errors import CliError
from loadtest.alike import BATCH, COMPANY, PROMPT, alike
from loadtest.live import baseline_of
from loadtest.live_layers import LAYERS, shares_of
from loadtest.live_verdict import LiveComparison, compare_live
from loadtest.server_side import ServerSide
from tracing.metrics import prompt_size_class

COUNT = 200
PREFILL_MS_PER_TOKEN, STEP_MS, STEP_MS_PER_SEQUENCE = 0.5, 18.0, 0.5


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.bootstrap.RESAMPLES", 300)


def request(
    rng: random.Random,
    *,
    tokens: int | None = None,
    running: int | None = None,
    output: int = 40,
    slower: float = 1.0,
    link_ms: float = 1.0,
    rtt_ms: float = 2.0,
    queue_ms: float = 5.0,
    gateway_ms: float = 0.1,
    **more: Any,
) -> dict[str, Any]:
    """One request by a simple law: prefill goes with tokens, decode with the batch, both with the engine's slowness."""
    tokens = tokens or rng.randint(90, 110)
    running = running or rng.randint(2, 5)
    prefill = slower * (20 + tokens * PREFILL_MS_PER_TOKEN) * rng.uniform(0.97, 1.03)
    tpot = slower * (STEP_MS + running * STEP_MS_PER_SEQUENCE) * rng.uniform(0.98, 1.02)
    stages = {
        "auth": 0.1, "route": 0.1, "gateway_queue": gateway_ms * rng.uniform(0.8, 1.2), "connect": 0.0, "send": 0.3,
        "transit_out": link_ms * rng.uniform(0.8, 1.2), "engine_tokenize": 0.5,
        "engine_queue": queue_ms * rng.uniform(0.5, 1.5), "engine_prefill": prefill, "engine_emit": 1.0,
        "transit_back": 0.4, "relay": 0.1,
    }  # fmt: skip
    ttft, streaming = sum(stages.values()), tpot * (output - 1)
    return {
        "upstream": "engine", "upstream_model": "m", "size": prompt_size_class(tokens), "stream": True,
        "ttft_ms": ttft, "tpot_ms": tpot, "e2e_ms": ttft + streaming,
        "stages_ms": {**stages, "streaming": streaming, "engine_decode": streaming}, "prompt_tokens": tokens,
        "computed_tokens": tokens, "output_tokens": output, "mean_batch": float(running), "engine_running": running,
        "engine_waiting": 0, "client_rtt_ms": rtt_ms * rng.uniform(0.9, 1.1), **more,
    }  # fmt: skip


def run_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A kept run of these requests."""
    columns: dict[str, list[Any]] = {
        "scheduled_us": list(range(len(samples))),
        "error": [None] * len(samples),
        "prompt_tokens": [one["prompt_tokens"] for one in samples],
        "output_tokens": [one["output_tokens"] for one in samples],
    }
    for name in samples[0]["stages_ms"] if samples else ():
        columns[f"{name}_ms"] = [one["stages_ms"][name] for one in samples]
    beside = ("prompt_tokens", "output_tokens", "stages_ms", "size", "stream")
    for name in (name for name in samples[0] if name not in beside):
        columns[f"server_{name}"] = [one[name] for one in samples]
    stage = {"counted_from_us": 0, "counted_to_us": len(samples)}
    return {
        "run": "r",
        "model": "m",
        "settings": {"workload": {"stream": True}},
        "stages": [stage],
        "requests": columns,
    }


def judged(then: dict[str, Any] | None = None, count: int = COUNT, **now: Any) -> LiveComparison:
    rng = random.Random(7)
    a = [request(rng, **(then or {})) for _ in range(COUNT)]
    return compare_live(run_of(a), [request(rng, **now) for _ in range(count)], random.Random(1))


def states(found: LiveComparison) -> dict[str, str]:
    return {name: layer.state for name, layer in found.layers.items()}


def test_traffic_like_the_runs_changes_nothing():
    found = judged()
    assert states(found) == dict.fromkeys(LAYERS, "unchanged")
    assert found.cause == "none"
    assert "no latency differs" in found.text


def test_a_slower_engine_is_told_by_requests_alike():
    found = judged(slower=1.4)
    assert states(found) == {**dict.fromkeys(LAYERS, "unchanged"), "engine": "changed"}
    assert found.cause == "engine"
    assert "of like requests" in found.layers["engine"].evidence[0]


def test_longer_prompts_are_traffic_and_not_the_engine():
    found = judged({"tokens": None}, tokens=200)
    assert states(found)["traffic"] == "changed"
    assert found.cause == "traffic"
    # No live prompt was as long as the run's: prefill is told by decode, which is the same engine's.
    prefill = [one for size in found.sizes for one in size.like_for_like if one.metric == "engine_prefill_p50"]
    assert not prefill


def test_a_longer_half_of_the_prompts_leaves_the_engine_unchanged():
    rng = random.Random(3)
    a = [request(rng, tokens=rng.choice((100, 100, 100, 220))) for _ in range(2 * COUNT)]
    live = [request(rng, tokens=rng.choice((100, 220, 220, 220))) for _ in range(2 * COUNT)]
    found = compare_live(run_of(a), live, random.Random(1))
    assert states(found)["engine"] == "unchanged"
    assert states(found)["traffic"] == "changed"
    assert found.cause == "traffic"


def test_more_company_is_traffic_though_every_token_takes_longer():
    rng = random.Random(3)
    a = [request(rng, running=rng.randint(1, 12)) for _ in range(2 * COUNT)]
    live = [request(rng, running=rng.randint(9, 12), output=40) for _ in range(COUNT)]
    live = [{**one, "engine_waiting": 2} for one in live]
    found = compare_live(run_of(a), live, random.Random(1))
    assert states(found)["engine"] == "unchanged"
    assert states(found)["traffic"] == "changed"


def test_a_slower_way_is_the_link():
    found = judged(link_ms=60.0, rtt_ms=80.0)
    assert states(found) == {**dict.fromkeys(LAYERS, "unchanged"), "link": "changed"}
    assert found.cause == "link"
    assert any("client_rtt" in line for line in found.layers["link"].evidence)


def test_a_round_trip_that_delayed_acknowledgements_explain_is_no_slow_link():
    assert states(judged(rtt_ms=30.0))["link"] == "unchanged"


def test_a_residual_is_no_evidence_of_a_slow_link():
    rng = random.Random(7)

    def far(transit: float) -> dict[str, Any]:
        one = request(rng, client_rtt_ms=None)
        stages = {name: ms for name, ms in one["stages_ms"].items() if not name.startswith("transit")}
        return {**one, "ttft_ms": one["ttft_ms"] + transit, "stages_ms": {**stages, "transit": transit}}

    a, live = [far(2.0) for _ in range(COUNT)], [far(90.0) for _ in range(COUNT)]
    found = compare_live(run_of(a), live, random.Random(1))
    assert states(found)["link"] == "unknown"
    assert found.cause == "unknown"


def test_another_model_at_the_upstream_is_the_model():
    found = judged(upstream_model="m2", slower=1.5)
    assert states(found)["model"] == "changed"
    assert "m2 at engine (100%)" in found.layers["model"].evidence[0]
    assert found.cause == "model"


def test_waiting_in_the_gateway_is_the_gateways():
    found = judged(gateway_ms=50.0)
    assert states(found) == {**dict.fromkeys(LAYERS, "unchanged"), "gateway": "changed"}
    assert found.cause == "gateway"


def test_an_engine_with_fewer_slots_changed_though_more_wait_for_it():
    found = judged({"running": 16, "engine_waiting": 0}, running=4, engine_waiting=12, queue_ms=200.0)
    assert states(found)["engine"] == "changed"
    assert "at most 4 run at once, 16 then" in found.layers["engine"].evidence[0]
    assert found.cause == "engine"


def test_prompt_sizes_that_the_run_has_not_are_new_traffic():
    rng = random.Random(7)
    a = [request(rng) for _ in range(COUNT)]
    live = [request(rng, tokens=rng.choice((100, 3000))) for _ in range(COUNT)]
    found = compare_live(run_of(a), live, random.Random(1))
    assert [size.size for size in found.sizes] == ["le_256"]
    assert "prompt sizes that the run hardly has: le_4096" in found.layers["traffic"].evidence[0]


@pytest.mark.parametrize(
    ("run", "count", "why"),
    [
        (
            lambda a: {**a, "requests": {**a["requests"], "server_upstream": [None] * COUNT}},
            COUNT,
            "account of the run",
        ),
        (lambda a: {**a, "requests": {"scheduled_us": []}}, COUNT, "account of the run"),
        (lambda a: a, 0, "no live traffic"),
        (lambda a: a, 5, "no prompt size has 20 requests on both sides"),
    ],
)
def test_without_evidence_it_is_unknown_and_says_why(run, count, why):
    rng = random.Random(7)
    a = run(run_of([request(rng) for _ in range(COUNT)]))
    found = compare_live(a, [request(rng) for _ in range(count)], random.Random(1))
    assert found.cause == "unknown"
    assert why in found.text
    assert states(found)["engine"] == states(found)["link"] == "unknown"
    assert found.view()["verdict"]["cause"] == "unknown"


def test_an_upstream_that_reports_nothing_leaves_the_engine_unknown():
    rng = random.Random(7)

    def silent(wait_ms: float) -> dict[str, Any]:
        one = request(rng, computed_tokens=None, mean_batch=None, engine_running=None, engine_waiting=None)
        kept = {name: one["stages_ms"][name] for name in ("auth", "route", "send", "relay", "streaming")}
        return {**one, "ttft_ms": wait_ms + 0.6, "stages_ms": {**kept, "upstream_wait": wait_ms}}

    a, live = [silent(50) for _ in range(COUNT)], [silent(90) for _ in range(COUNT)]
    found = compare_live(run_of(a), live, random.Random(1))
    assert states(found)["engine"] == "unknown"
    assert found.cause == "unknown"
    assert "ttft_p50" in found.text


def test_what_layers_are_given_sums_to_the_change_of_the_mean():
    found = judged(slower=1.2, link_ms=20.0, output=60)
    (size,) = found.sizes
    for to_first_token, figure in ((True, "ttft_ms"), (False, "e2e_ms")):
        means = [sum(getattr(one, figure) for one in side) / len(side) for side in (size.a, size.live)]
        shares = shares_of(size, found.layers, to_first_token=to_first_token)
        assert sum(shares.values()) == pytest.approx(means[1] - means[0], rel=1e-6)


def test_alike_are_those_within_a_tenth_of_the_prompt_and_a_fifth_of_the_company():
    def one(tokens: int, running: int, batch: float, ms: float) -> ServerSide:
        fields = {"computed_tokens": tokens, "engine_running": running, "mean_batch": batch, "ttft_ms": ms}
        return ServerSide("engine", "le_256", **fields)

    a = [one(100, 4, 4.0, 1.0), one(200, 20, 20.0, 2.0)]
    b = [one(108, 5, 4.3, 3.0), one(150, 4, 9.0, 4.0), one(190, 17, 21.0, 5.0)]
    b.append(msgspec.structs.replace(b[0], engine_running=None))
    rng = random.Random(1)
    assert alike(a, b, lambda r: r.ttft_ms, (PROMPT, COMPANY), rng) == ([1.0, 2.0], [3.0, 5.0])
    assert alike(a, b, lambda r: r.ttft_ms, (BATCH,), rng)[1] == [3.0, 5.0, 3.0]


def test_only_good_requests_that_count_are_the_baseline():
    rng = random.Random(7)
    run = run_of([request(rng) for _ in range(6)])
    run["requests"]["error"][1] = "timeout"
    run["requests"]["server_upstream"][2] = None
    run["stages"][0]["counted_to_us"] = 5
    found = baseline_of(run)
    assert len(found) == 3
    assert found[0].stages_ms["engine_prefill"] == run["requests"]["engine_prefill_ms"][0]
    assert found[0].upstream_model == "m"


@pytest.mark.parametrize(
    ("b", "live", "fail_on", "words"),
    [
        (None, None, None, "either a second run or --live"),
        ("b", "1h", None, "either a second run or --live"),
        (None, "1h", ["ttft_p99>+10%"], "--fail-on judges a second run"),
    ],
)
def test_either_a_second_run_or_live_traffic_is_compared(b, live, fail_on, words):
    with pytest.raises(CliError, match=words):
        check_arguments(b, live, fail_on)


def test_the_command_tells_layers_and_verdict_and_asks_for_the_runs_model(monkeypatch, capsys):
    rng = random.Random(7)
    run = run_of([request(rng) for _ in range(COUNT)])
    asked: dict[str, Any] = {}

    class Ops:
        def request(self, method: str, path: str, params: dict[str, Any]) -> dict[str, Any]:
            asked.update(params, path=path)
            samples = [request(rng, slower=1.4) for _ in range(COUNT)]
            return {
                "window": "30m", "requests": 900, "load_tests_left_out": 7, "outcomes": {"ok": 900}, "samples": samples,
            }  # fmt: skip

    monkeypatch.setattr("cli.ops.ops_client", lambda url, config: Ops())
    compare_with_live(run, "30m", None, as_json=False)
    out, err = capsys.readouterr()
    assert asked == {"path": "/live", "window": "30m", "model": "m"}
    assert "7 of load tests left out" in " ".join(out.split())
    assert "engine   changed" in out
    assert "Most of the difference is of the engine." in " ".join(out.split())
    assert "200 of 900 live requests are compared" in " ".join(err.split())
    compare_with_live(run, "30m", None, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"]["cause"] == "engine"
    assert told["layers"]["model"]["state"] == "unchanged"
    assert told["live"]["load_tests_left_out"] == 7
