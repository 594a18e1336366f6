"""What `why --window` shows: the verdict, the two groups stage by stage, and TTFT by prompt size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from cli.chart import NAME_CELLS, in_time_order
from cli.language import Language
from cli.story import ms_text, verdict_lines
from cli.words import Words
from cli.wrap import padded

COLUMN_CELLS = 14

Window = dict[str, Any]
"""A window as the admin API gives it."""


def window_story_of(window: Window, *, cells: int, language: Language = "en") -> Iterator[Text]:
    """The page, line by line."""
    words = Words(language)
    model = window.get("model") or words("all_models")
    yield Text(words("window", window=window["window"], model=model), style="bold")
    yield from verdict_lines(window["verdict"], cells, words)
    if window["slowest"]["requests"]:
        yield from _groups(window, words)
        yield from _sizes(window, words)
    times = window.get("ttft_ms")
    if times:
        yield Text("")
        yield Text("  " + words("mean", ms=ms_text(times["mean_for_reference"])), style="dim")
    if ids := window["slowest"]["request_ids"]:
        yield Text("  " + words("slowest_ids", ids=ids[0]))
        for other in ids[1:]:
            yield Text("    " + other)


def _groups(window: Window, words: Words) -> Iterator[Text]:
    slow, half = window["slowest"], window["median_half"]
    part = {one["stage"]: one["share"] for one in window["difference"]}
    yield Text("")
    yield Text("  " + words("groups", slow=slow["requests"], half=half["requests"]), style="bold")
    yield _row("", words("column_slowest"), words("column_half"), words("column_part"), style="dim")
    for stage, ms in in_time_order(slow["stages_mean_ms"]):
        usual = half["stages_mean_ms"].get(stage)
        share = f"{part[stage] * 100:.1f} %" if stage in part else "-"
        style = "bold yellow" if window["difference"] and stage == window["difference"][0]["stage"] else ""
        yield _row(stage, f"{ms:.2f}", "-" if usual is None else f"{usual:.2f}", share, style=style)
    yield Text("  " + words("part"), style="dim")


def _sizes(window: Window, words: Words) -> Iterator[Text]:
    if not window["sizes"]:
        return
    by = window["by"]
    yield Text("")
    yield Text("  " + words("by_size") + f" ({by.upper()}, ms)", style="bold")
    yield _row(words("column_size"), "P50", "P95", "P99", words("column_share"), style="dim")
    for size, found in window["sizes"].items():
        name = words("size_unknown") if size == "unknown" else size.replace("le_", "<= ").replace("gt_", "> ")
        times = found[f"{by}_ms"] or {}
        quantiles = [f"{times[key]:.2f}" if key in times else "-" for key in ("p50", "p95", "p99")]
        yield _row(name, *quantiles, f"{found['share'] * 100:.1f} %")


def _row(name: str, *columns: str, style: str = "") -> Text:
    """A name on the left and columns on the right."""
    text = "  " + name + " " * (NAME_CELLS - cell_len(name))
    return Text(text + "".join(padded(column, COLUMN_CELLS) for column in columns), style=style)
