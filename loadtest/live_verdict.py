"""What became of a run's figures in live traffic, and which layer made the difference: in words and as JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadtest.bootstrap import CONFIDENCE
from loadtest.compare import Difference
from loadtest.digits import four_digits
from loadtest.figures import rounded
from loadtest.live import ENOUGH, SizeFound, baseline_of, compare_sizes
from loadtest.live_layers import LAYERS, Layer, is_changed, layers_of, shares_of
from loadtest.server_side import ServerSide

LATENCIES = ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "e2e_p50", "e2e_p95")


class LiveComparison(msgspec.Struct, frozen=True):
    """A run against live traffic."""

    a: list[ServerSide]
    live: list[ServerSide]
    sizes: list[SizeFound]
    layers: dict[str, Layer]

    @property
    def latencies(self) -> list[Difference]:
        """Sure and large changes of latency, of every size that was compared."""
        found = [one for size in self.sizes for name in LATENCIES if (one := size.difference(name)) is not None]
        return [one for one in found if is_changed(one)]

    @property
    def cause(self) -> str:
        """The layer that made most of the change of latency; `none`: it did not change; `unknown`: not to be told."""
        if not self.sizes:
            return "unknown"
        changed = self.latencies
        if not changed:
            return "none"
        to_first_token = any(one.metric.startswith("ttft") for one in changed)
        total: dict[str, float] = {}
        for size in self.sizes:
            if any(one.stage == size.size for one in changed):
                for layer, ms in shares_of(size, self.layers, to_first_token=to_first_token).items():
                    total[layer] = total.get(layer, 0.0) + ms * len(size.live)
        # What went the other way explains nothing.
        sign = 1 if sum(total.values()) >= 0 else -1
        layer, most = max(((name, sign * ms) for name, ms in total.items()), key=lambda one: one[1], default=("", 0.0))
        if most <= 0 or (layer in self.layers and self.layers[layer].state == "unknown"):
            return "unknown"
        return layer

    @property
    def text(self) -> str:
        """One paragraph."""
        if not self.sizes:
            return f"Nothing can be compared: {self._why_not()}."
        if self.cause == "none":
            head = "Live traffic is served as the run was: no latency differs by a tenth, surely."
        else:
            most = max(self.latencies, key=lambda one: abs(one.share or 0.0))
            verb = "more" if most.change > 0 else "less"
            head = (
                f"{most.metric} of {most.stage} prompts: {four_digits(most.b)} ms in live traffic, "
                f"{four_digits(most.a)} ms in the run, {abs(most.share or 0.0):.0%} {verb}. "
            )
            head += (
                "What was measured does not tell which layer it was."
                if self.cause == "unknown"
                else f"Most of the difference is of the {self.cause}."
            )
        states = {
            state: [name for name in LAYERS if self.layers[name].state == state] for state in ("changed", "unknown")
        }
        changed = f" Changed: {', '.join(states['changed'])}." if states["changed"] else " No layer changed."
        return head + changed + (f" Unknown: {', '.join(states['unknown'])}." if states["unknown"] else "")

    def _why_not(self) -> str:
        if not self.a:
            return "the gateway's account of the run is not known; repeat it through this gateway"
        if not self.live:
            return "there was no live traffic in the window"
        return f"no prompt size has {ENOUGH} requests on both sides"

    def view(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "confidence": CONFIDENCE,
            "requests": {"a": len(self.a), "live": len(self.live)},
            "layers": {name: msgspec.to_builtins(layer) for name, layer in self.layers.items()},
            "sizes": [self._size_view(size) for size in self.sizes],
            "verdict": {
                "cause": self.cause,
                "changed": [name for name, layer in self.layers.items() if layer.state == "changed"],
                "text": self.text,
            },
        }

    def _size_view(self, size: SizeFound) -> dict[str, Any]:
        return {
            "size": size.size,
            "requests": {"a": len(size.a), "live": len(size.live)},
            "differences": [_view(one) for one in size.differences],
            "like_for_like": [_view(one) for one in size.like_for_like],
            "mean_ttft_change_ms": _rounded(shares_of(size, self.layers, to_first_token=True)),
            "mean_e2e_change_ms": _rounded(shares_of(size, self.layers, to_first_token=False)),
        }


def compare_live(run: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], rng: random.Random) -> LiveComparison:
    """`samples` are what the gateway's ops listener gives of the window."""
    a = baseline_of(run)
    live = [msgspec.convert(dict(one), ServerSide) for one in samples if one.get("stream", True) == _is_stream(run)]
    sizes = compare_sizes(a, live, rng)
    return LiveComparison(a, live, sizes, layers_of(a, live, sizes))


def _is_stream(run: Mapping[str, Any]) -> bool:
    return bool(run["settings"].get("workload", {}).get("stream", True))


def _view(found: Difference) -> dict[str, Any]:
    return {
        "metric": found.metric, "a": found.a, "live": found.b, "change": found.change, "share": found.share,
        "low": found.low, "high": found.high, "is_changed": is_changed(found),
    }  # fmt: skip


def _rounded(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: rounded(ms) for name, ms in shares.items()}
