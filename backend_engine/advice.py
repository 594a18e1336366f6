"""Advice: which one or two settings hold tokens per second back, told by the engine's own counts (docs/advice.md).

A rule is a pure function of one window of counts, of what was usual before it, and of what the engine runs with. Every
threshold stands here, and in docs/advice.md with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

MOST = 2
"""Advice given at once: who changes more than two settings does not learn which one helped."""

IDLE_SHARE = 0.05
"""Of device time between steps while there is work."""
FULL_SHARE = 0.5
"""Of the engine's reports that found every slot taken and requests waiting."""
KV_HEADROOM = 0.2
JITTER = 3.0
"""P99 of the time between two tokens, over its median."""
JITTER_FLOOR_MS = 5.0
"""A P99 this close to the median is nobody's trouble, whatever the factor."""
WORSE, BETTER = 1.5, 1.1
"""TTFT and prefill over what was usual; TPS over what was usual."""
BUDGET_SHARE = 0.2
"""Of the steps with prompt tokens that used the whole token budget."""
HITS_BEFORE, HITS_LEFT = 0.3, 0.5
"""A hit rate that was worth something, and the part of it below which it has collapsed."""

MIN_TOKEN_GAPS = 100
MIN_REQUESTS = 10
MIN_LOOKED_UP_TOKENS = 1000


class Window(msgspec.Struct, frozen=True):
    """What happened in some seconds of work. Times in ms; None: nothing of the kind happened."""

    seconds: float
    steps: int
    forward_ms: float
    """Device time of all steps."""
    gap_ms: float
    """Device time between steps while there was work."""
    prefill_steps: int
    """Steps with prompt tokens."""
    budget_steps: int
    """Those of them that used the whole token budget."""
    output_tokens: int
    reports: int
    full_reports: int
    """Reports with every slot taken and requests waiting."""
    kv_peak_ratio: float
    token_gaps: int
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    requests: int
    """That got their first token."""
    ttft_p50_ms: float | None
    prefill_p50_ms: float | None
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    evictions: int

    @property
    def tps(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def idle_share(self) -> float:
        """From 0 to 1."""
        work_ms = self.forward_ms + self.gap_ms
        return self.gap_ms / work_ms if work_ms else 0.0

    @property
    def hit_ratio(self) -> float | None:
        """Of prompt tokens found in the prefix cache; None where too few were looked up."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries >= MIN_LOOKED_UP_TOKENS else None


class Usual(msgspec.Struct, frozen=True):
    """Medians over the windows before. None: not known yet."""

    tps: float | None = None
    ttft_ms: float | None = None
    prefill_ms: float | None = None
    hit_ratio: float | None = None


class Facts(msgspec.Struct, frozen=True):
    """What the engine runs with."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    async_scheduling: bool
    overlap_token_interval: bool
    slot_reuse: bool
    is_cpu: bool
    kv_pages: int
    most_kv_pages: int
    """That all slots together could ever fill."""


class Advice(msgspec.Struct, frozen=True):
    """One thing to change."""

    name: str
    """Label of the metric; fixed."""
    settings: tuple[str, ...]
    """Dotted keys to change; none where no setting helps."""
    text: str


Rule = Callable[[Window, Usual, Facts], Advice | None]


def kv_cache(window: Window, _usual: Usual, facts: Facts) -> Advice | None:
    """Headroom is nearly gone, and more pages could be used: the cache comes before anything else."""
    if window.kv_peak_ratio <= 1 - KV_HEADROOM or facts.kv_pages >= facts.most_kv_pages:
        return None
    keys = ("engine.cpu_kv_cache_gib",) if facts.is_cpu else ("engine.gpu_memory_utilization", "model.kv_cache_ratio")
    return Advice(
        "kv_cache",
        keys,
        f"The KV cache was up to {window.kv_peak_ratio:.0%} full; under {KV_HEADROOM:.0%} of headroom requests wait or "
        f"are preempted. Enlarge it first: raise {' or '.join(keys)}.",
    )


def async_scheduling(window: Window, _usual: Usual, facts: Facts) -> Advice | None:
    """The device idles between steps and the pipeline is off."""
    return None if facts.async_scheduling else _idle("async_scheduling", window, facts)


def overlap_token_interval(window: Window, _usual: Usual, facts: Facts) -> Advice | None:
    """The device idles between steps and their host work is not overlapped with forwards."""
    return None if facts.overlap_token_interval else _idle("overlap_token_interval", window, facts)


def slot_reuse(window: Window, _usual: Usual, facts: Facts) -> Advice | None:
    """The device idles between steps and its state is rebuilt for each."""
    return None if facts.slot_reuse else _idle("slot_reuse", window, facts)


SWITCHES = ("async_scheduling", "overlap_token_interval", "slot_reuse")


def _idle(switch: str, window: Window, facts: Facts) -> Advice | None:
    if window.idle_share < IDLE_SHARE:
        return None
    others = [other for other in SWITCHES if other != switch and not getattr(facts, other)]
    also = f" ({' and '.join(others)} {'is' if len(others) == 1 else 'are'} off as well)" if others else ""
    key = f"token_interval.{switch}"
    mean_ms = window.gap_ms / window.steps
    return Advice(
        switch,
        (key,),
        f"While there was work the device idled {window.idle_share:.0%} of the time, {mean_ms:.1f} ms between two "
        f"steps. Set {key} = true{also}.",
    )


def max_num_seqs(window: Window, _usual: Usual, facts: Facts) -> Advice | None:
    """Requests wait for slots although the cache has room for more of them."""
    if not window.reports or window.full_reports / window.reports < FULL_SHARE:
        return None
    room = (1 - KV_HEADROOM) / window.kv_peak_ratio if window.kv_peak_ratio else 2.0
    wanted = int(facts.max_num_seqs * min(2.0, room))
    if wanted <= facts.max_num_seqs:
        return None
    share = window.full_reports / window.reports
    return Advice(
        "max_num_seqs",
        ("scheduler.max_num_seqs",),
        f"All {facts.max_num_seqs} slots were taken and requests waited {share:.0%} of the time, with the KV cache at "
        f"most {window.kv_peak_ratio:.0%} full. Raise scheduler.max_num_seqs, to {wanted} at first.",
    )


def enable_chunked_prefill(window: Window, _usual: Usual, facts: Facts) -> Advice | None:
    """Tokens come unevenly, since whole prompts are prefilled between them."""
    p50, p99 = window.tpot_p50_ms, window.tpot_p99_ms
    if facts.enable_chunked_prefill or not window.prefill_steps or window.token_gaps < MIN_TOKEN_GAPS:
        return None
    if p50 is None or p99 is None or p99 < max(JITTER * p50, p50 + JITTER_FLOOR_MS):
        return None
    return Advice(
        "enable_chunked_prefill",
        ("scheduler.enable_chunked_prefill",),
        f"Time between tokens jitters: P99 {p99:.0f} ms over a median of {p50:.0f} ms, with whole prompts prefilled in "
        "one step. Set scheduler.enable_chunked_prefill = true.",
    )


def max_num_batched_tokens(window: Window, usual: Usual, facts: Facts) -> Advice | None:
    """More decoding leaves the prompts less of each step: TTFT grew where TPS did."""
    ttft, prefill = window.ttft_p50_ms, window.prefill_p50_ms
    if ttft is None or prefill is None or window.requests < MIN_REQUESTS:
        return None
    if usual.ttft_ms is None or usual.prefill_ms is None or usual.tps is None:
        return None
    is_worse = ttft >= WORSE * usual.ttft_ms and prefill >= WORSE * usual.prefill_ms
    is_bound = window.budget_steps >= BUDGET_SHARE * window.prefill_steps > 0
    if not is_worse or not is_bound or window.tps < BETTER * usual.tps:
        return None
    return Advice(
        "max_num_batched_tokens",
        ("scheduler.max_num_batched_tokens",),
        f"Prefill is squeezed by decode: TTFT went from {usual.ttft_ms:.0f} to {ttft:.0f} ms while throughput went "
        f"from {usual.tps:.0f} to {window.tps:.0f} tokens/s, and {window.budget_steps} of {window.prefill_steps} steps "
        f"with prompts were full. Tune scheduler.max_num_batched_tokens (now {facts.max_num_batched_tokens}): more "
        "helps TTFT, less helps the time between tokens.",
    )


def prefix_cache(window: Window, usual: Usual, facts: Facts) -> Advice | None:
    """Prompts stopped being found in the cache."""
    now, before = window.hit_ratio, usual.hit_ratio
    if now is None or before is None or before < HITS_BEFORE or now > HITS_LEFT * before:
        return None
    fell = f"The prefix cache's hit rate fell from {before:.0%} to {now:.0%}"
    if not window.evictions:
        cause = "though nothing was evicted: prompts no longer begin alike"
        return Advice("prefix_cache", (), f"{fell} {cause}. Keep what they share at their beginning.")
    key = "engine.cpu_kv_cache_gib" if facts.is_cpu else "engine.gpu_memory_utilization"
    return Advice(
        "prefix_cache",
        (key,),
        f"{fell}, with {window.evictions} pages evicted: prompts push one another out. Enlarge the KV cache ({key}).",
    )


RULES: tuple[Rule, ...] = (
    kv_cache,
    async_scheduling,
    max_num_seqs,
    overlap_token_interval,
    slot_reuse,
    enable_chunked_prefill,
    max_num_batched_tokens,
    prefix_cache,
)
"""In the order in which they are worth following."""
NAMES: tuple[str, ...] = tuple(rule.__name__ for rule in RULES)


def advice_on(window: Window, usual: Usual, facts: Facts, rules: Sequence[Rule] = RULES) -> tuple[Advice, ...]:
    """The first MOST pieces of advice that hold."""
    found = [advice for rule in rules if (advice := rule(window, usual, facts)) is not None]
    return tuple(found[:MOST])
