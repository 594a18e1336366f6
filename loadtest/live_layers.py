"""Which layer changed between a run and live traffic: model, traffic, link, engine or gateway, each with its evidence.

A layer is `changed` or `unchanged` by what was measured on both sides, else `unknown`. What latency itself did is
shared out over the layers by the means of the stages, which sum; percentiles never do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from loadtest.compare import Difference
from loadtest.digits import four_digits
from loadtest.live import ENOUGH, TRAFFIC, SizeFound
from loadtest.server_side import LATE_STAGES, ServerSide

LAYERS = ("model", "traffic", "link", "engine", "gateway")
CHANGED_SHARE = 0.1
"""Live traffic is never quite alike: a sure difference below this is none."""
LEAST_MS = 1.0
"""Of a stage, whatever its share."""
STAGE_SHARE = 0.02
"""Of the whole TTFT (or E2E), below which a stage's change is none."""
RTT_RATIO, RTT_MS = 1.5, 40.0
"""A smoothed round trip holds delayed acknowledgements, up to 40 ms: only a larger change is the link's."""
STRANGE_SHARE = 0.05
"""Share of live requests at another upstream or model from which on the model changed."""
NEW_SIZES_SHARE = 0.2
"""Share of live requests of sizes that the run has not, from which on the traffic changed."""
FEWER_SLOTS = 0.8

LINK_STAGES = ("receive", "connect", "send", "transit_out", "transit_back")
RESIDUAL = "transit"
GATEWAY_STAGES = ("auth", "route", "gateway_queue", "failed_attempts", "relay", "closing")
TEXT_STAGES = ("engine_tokenize", "engine_emit")
State = Literal["changed", "unchanged", "unknown"]


class Layer(msgspec.Struct, frozen=True):
    """One layer, whether it changed, and by what that is known."""

    state: State
    evidence: list[str]


def layers_of(a: Sequence[ServerSide], live: Sequence[ServerSide], sizes: Sequence[SizeFound]) -> dict[str, Layer]:
    """Every layer of LAYERS."""
    return {
        "model": _model(a, live),
        "traffic": _traffic(a, live, sizes),
        "link": _link(sizes),
        "engine": _engine(sizes),
        "gateway": _stages(sizes, GATEWAY_STAGES, "the gateway's own stages"),
    }


def shares_of(size: SizeFound, layers: dict[str, Layer], *, to_first_token: bool) -> dict[str, float]:
    """Change of the mean TTFT (or E2E) in ms by layer; `unknown` holds what no evidence assigns. They sum to it."""
    shares: dict[str, float] = {}

    def give(layer: str, ms: float) -> None:
        shares[layer] = shares.get(layer, 0.0) + ms

    for stage, ms in size.mean_change_ms.items():
        if to_first_token and stage in LATE_STAGES:
            continue
        if stage in GATEWAY_STAGES or stage == "unaccounted":
            give("gateway", ms)
        elif stage in LINK_STAGES:
            give("link", ms)
        elif stage in TEXT_STAGES:
            give("engine", ms)
        elif stage == "engine_queue":
            give("engine" if _has_fewer_slots(size) or not _is_busier(size) else "traffic", ms)
        elif stage in ("engine_prefill", "streaming", "engine_decode"):
            own = _engines_part(size, stage)
            if own is None:
                give("traffic" if _goes_with_work(size, layers, stage, ms) else "unknown", ms)
                continue
            # What like requests lost or gained is the engine's; what is left comes of other work in other company.
            give("model" if layers["model"].state == "changed" else "engine", own)
            give("traffic", ms - own)
        else:
            give("unknown", ms)
    return shares


def is_changed(found: Difference, smallest: float = CHANGED_SHARE) -> bool:
    """Sure, and large enough for live traffic."""
    if found.low is None or found.high is None or found.low <= 0 <= found.high:
        return False
    return abs(found.change) >= smallest * abs(found.a)


def _model(a: Sequence[ServerSide], live: Sequence[ServerSide]) -> Layer:
    ours = {(one.upstream, one.upstream_model) for one in a}
    theirs = Counter((one.upstream, one.upstream_model) for one in live)
    if not ours or not theirs:
        return Layer("unknown", ["which upstream and model answered is not known on both sides"])
    told = "; ".join(f"{model} at {upstream}" for upstream, model in sorted(ours, key=str))
    strange = {pair: count for pair, count in theirs.items() if pair not in ours}
    if sum(strange.values()) < STRANGE_SHARE * len(live):
        return Layer("unchanged", [f"{told}, as then; weights that were exchanged under the same name are not seen"])
    new = "; ".join(f"{model} at {upstream} ({count / len(live):.0%})" for (upstream, model), count in strange.items())
    return Layer("changed", [f"then {told}; now also or instead {new}"])


def _traffic(a: Sequence[ServerSide], live: Sequence[ServerSide], sizes: Sequence[SizeFound]) -> Layer:
    evidence = []
    known = Counter(one.size for one in a)
    new = Counter(one.size for one in live if known[one.size] < ENOUGH)
    if live and new.total() >= NEW_SIZES_SHARE * len(live):
        told = ", ".join(f"{size} ({count / len(live):.0%})" for size, count in new.most_common())
        evidence.append(f"prompt sizes that the run hardly has: {told}")
    compared = 0
    for size in sizes:
        for name in TRAFFIC:
            for label in ("p50", "p95"):
                found = size.difference(f"{name}_{label}")
                compared += found is not None
                if found is not None and is_changed(found) and abs(found.change) >= 1:
                    evidence.append(_told(found))
                    break
    if evidence:
        return Layer("changed", evidence)
    if not compared:
        return Layer("unknown", ["no prompt size has enough requests on both sides"])
    return Layer("unchanged", [f"lengths, cached shares and company are alike in {_names(sizes)}"])


def _link(sizes: Sequence[SizeFound]) -> Layer:
    found = _stages(sizes, LINK_STAGES, "upload, connection and transit")
    evidence = list(found.evidence) if found.state == "changed" else []
    rtts = [rtt for size in sizes if (rtt := size.difference("client_rtt_p50")) is not None]
    evidence += [
        _told(rtt)
        for rtt in rtts
        if is_changed(rtt) and abs(rtt.change) >= RTT_MS and max(rtt.a, rtt.b) >= RTT_RATIO * min(rtt.a, rtt.b)
    ]
    if evidence:
        return Layer("changed", evidence)
    residual = [one for size in sizes if (one := size.difference(f"{RESIDUAL}_p50")) and _is_large(one, size)]
    if residual:
        told = [_told(one) for one in residual]
        return Layer("unknown", [*told, "transit is what the engine did not report, no evidence of a slow network"])
    if not rtts and found.state == "unknown":
        return found
    return Layer("unchanged", [*(_told(rtt) for rtt in rtts), *found.evidence])


def _engine(sizes: Sequence[SizeFound]) -> Layer:
    like = [one for size in sizes for one in size.like_for_like]
    changed = [_told(one) + ", of like requests" for one in like if is_changed(one)]
    changed += [
        f"{size.size}: at most {_most_running(size.live):g} run at once, {_most_running(size.a):g} then; others wait"
        for size in sizes
        if _has_fewer_slots(size)
    ]
    text = _stages(sizes, TEXT_STAGES, "tokenising and writing")
    if text.state == "changed":
        changed += text.evidence
    if changed:
        return Layer("changed", changed)
    if not like:
        return Layer("unknown", [f"fewer than {ENOUGH} live requests met the conditions of the run's (prompt, batch)"])
    return Layer("unchanged", [_told(one) + ", of like requests" for one in like])


def _stages(sizes: Sequence[SizeFound], stages: Sequence[str], what: str) -> Layer:
    found = [(one, size) for size in sizes for stage in stages if (one := size.difference(f"{stage}_p50")) is not None]
    if not found:
        return Layer("unknown", [f"{what} were not measured on both sides"])
    changed = [_told(one) for one, size in found if _is_large(one, size)]
    return Layer("changed", changed) if changed else Layer("unchanged", [f"{what} are as they were"])


def _is_large(found: Difference, size: SizeFound) -> bool:
    whole = size.difference("e2e_p50" if found.server_stage in LATE_STAGES else "ttft_p50")
    whole = whole or size.difference("e2e_p50")
    least = max(LEAST_MS, STAGE_SHARE * whole.a) if whole is not None else LEAST_MS
    return is_changed(found) and abs(found.change) >= least


def _is_busier(size: SizeFound) -> bool:
    names = ("engine_running_p50", "engine_waiting_p50", "engine_running_p95", "engine_waiting_p95")
    return any((one := size.difference(name)) is not None and one.change > 0 and is_changed(one) for name in names)


def _has_fewer_slots(size: SizeFound) -> bool:
    waiting = size.difference("engine_waiting_p95")
    if waiting is None or waiting.b < 1 or waiting.change <= 0:
        return False
    return _most_running(size.live) < FEWER_SLOTS * _most_running(size.a)


def _most_running(side: Sequence[ServerSide]) -> float:
    return max((one.engine_running for one in side if one.engine_running is not None), default=0)


def _engines_part(size: SizeFound, stage: str) -> float | None:
    """What the engine alone added to the mean of a stage, by requests alike; None where there were too few."""
    name = "engine_prefill_p50" if stage == "engine_prefill" else "tpot_p50"
    found = next((one for one in size.like_for_like if one.metric == name), None)
    if found is None:
        return None
    if not is_changed(found):
        return 0.0
    tokens = [one.output_tokens for one in size.live if one.output_tokens]
    steps = sum(tokens) / len(tokens) - 1 if tokens else 0.0
    return found.change if stage == "engine_prefill" else found.change * steps


def _goes_with_work(size: SizeFound, layers: dict[str, Layer], stage: str, ms: float) -> bool:
    """No request was like any of the run's: where the engine is the same otherwise, more tokens explain more time."""
    work = size.difference("computed_tokens_p50" if stage == "engine_prefill" else "output_tokens_p50")
    if work is None or layers["engine"].state != "unchanged" or layers["model"].state != "unchanged":
        return False
    return is_changed(work) and (work.change > 0) == (ms > 0)


def _told(found: Difference) -> str:
    share = "" if found.share is None else f" ({found.share:+.0%})"
    return f"{found.stage}: {found.metric} {four_digits(found.a)} then, {four_digits(found.b)} now{share}"


def _names(sizes: Sequence[SizeFound]) -> str:
    return ", ".join(size.size for size in sizes)
