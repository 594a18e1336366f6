"""What `why` shows of one request: verdict, times, stages as a waterfall, attempts, and the engine that it met."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cli.chart import USUAL_CELLS, amount, heading, in_time_order, waterfall
from cli.language import Language
from cli.words import Words
from cli.wrap import wrapped

MAX_CELLS = 120
AFTER_STAGES = ("streaming", "closing")

Record = dict[str, Any]
"""One request as the admin API gives it."""


def show_request(record: Record, console: Console, language: Language = "en") -> None:
    """Prints the whole page."""
    blocks = console.encoding.lower().startswith("utf")
    print_lines(story_of(record, cells=min(console.width, MAX_CELLS), blocks=blocks, language=language), console)


def print_lines(lines: Iterator[Text], console: Console) -> None:
    """Prints lines that were made for the console's width."""
    for line in lines:
        console.print(line, no_wrap=True, overflow="ellipsis")


def story_of(record: Record, *, cells: int, blocks: bool = True, language: Language = "en") -> Iterator[Text]:
    """The page, line by line."""
    return _Story(record, cells, blocks, Words(language)).lines()


def verdict_lines(verdict: Record, cells: int, words: Words) -> Iterator[Text]:
    """The verdict: its cause, why, and what to do."""
    style = "bold green" if verdict.get("cause") == "none" else "bold yellow"
    confidence = words(f"confidence_{verdict['confidence']}")
    yield Text("  " + words("verdict", cause=verdict["cause"], confidence=confidence), style=style)
    for line in wrapped(verdict["text"], cells - 2):
        yield Text("  " + line)
    if verdict.get("action"):
        for line in wrapped(words("advice", action=verdict["action"]), cells - 2):
            yield Text("  " + line, style="bold")


def when(started: Any) -> str:
    """Local date and time of `started`: an ISO date, or ns since 1970."""
    try:
        if isinstance(started, str):
            moment = datetime.datetime.fromisoformat(started)
        else:
            moment = datetime.datetime.fromtimestamp(float(started) / 1e9, datetime.UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return str(started)
    return moment.astimezone().isoformat(sep=" ", timespec="seconds")


def ms_text(value: float | None) -> str:
    """Milliseconds, or a dash for what is unknown."""
    return "-" if value is None else f"{value:.2f} ms"


class _Story:
    """One request on lines of so many cells."""

    def __init__(self, record: Record, cells: int, blocks: bool, words: Words) -> None:
        self._record = record
        self._cells = cells
        self._blocks = blocks
        self._words = words

    def lines(self) -> Iterator[Text]:
        """The page."""
        yield Text(str(self._record["request_id"]), style="bold")
        if verdict := self._record.get("verdict"):
            yield from verdict_lines(verdict, self._cells, self._words)
            yield Text("")
        yield from self._header()
        yield from self._stages()
        yield from self._after_first_token()
        yield from self._attempts()
        yield from self._engine_and_tokens()

    def _header(self) -> Iterator[Text]:
        record, words = self._record, self._words
        kind = words("stream" if record.get("stream") else "whole")
        ended = words("ended", outcome=record.get("outcome"), status=record.get("status"))
        if record.get("error_code"):
            ended += words("comma") + record["error_code"]
        served = {name: record.get(name) for name in ("model", "upstream", "surface")}
        yield from self._said(words("served", kind=kind, **served))
        yield from self._said(ended + words("comma") + when(record.get("started")))
        if record.get("client_request_id"):
            yield from self._said(words("client_id", id=record["client_request_id"]))
        yield from self._said(words("trace", id=record.get("trace_id")))
        yield Text("")
        times = Text("  ")
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms")):
            times.append(f"{name} ").append(ms_text(record.get(key)), style="bold").append("   ")
        yield times
        for definition in ("definition_ttft", "definition_tpot"):
            yield from self._said(words(definition), style="dim")

    def _said(self, text: str, *, style: str = "") -> Iterator[Text]:
        for line in wrapped(text, self._cells - 2):
            yield Text("  " + line, style=style)

    def _usual_ms(self) -> dict[str, float] | None:
        """The median of each stage; None where nothing was compared."""
        baseline = self._record.get("baseline") or {}
        if baseline.get("compared_with") not in ("class", "all_sizes"):
            return None
        return {stage: quantiles["p50_ms"] for stage, quantiles in baseline["stages"].items() if quantiles}

    def _stages(self) -> Iterator[Text]:
        record, words = self._record, self._words
        stages = in_time_order(record.get("stages") or {})
        total_ms, usual_ms = record.get("total_ms"), self._usual_ms()
        yield Text("")
        if not stages or not total_ms:
            yield from self._said(words("no_stage"))
            return
        figure = "TTFT" if record.get("ttft_ms") is not None else "E2E"
        yield Text("  " + words("stages", figure=figure), style="bold")
        if usual_ms is not None:
            columns = (words("column_took"), words("column_share"), words("column_usual"))
            yield heading(columns, cells=self._cells)
        unaccounted_ms = record.get("unaccounted_ms")
        if unaccounted_ms is not None:
            stages.append(("unaccounted", unaccounted_ms))
        yield from self._waterfall(stages, total_ms, usual_ms)
        width = self._cells - 2 - len(amount(0, 1)) - (0 if usual_ms is None else USUAL_CELLS)
        total = words("total")
        yield Text("  " + total + " " * (width - cell_len(total)) + amount(total_ms, total_ms), style="bold")
        if usual_ms is not None:
            baseline = record["baseline"]
            yield from self._said(
                words(f"usual_{baseline['compared_with']}", requests=baseline.get("requests")), style="dim"
            )
        if unaccounted_ms is None:
            yield from self._said(words("residual"), style="dim")
        for name in record.get("anomalies") or ():
            yield from self._said(words("negative", stage=name), style="red")

    def _waterfall(
        self, stages: list[tuple[str, float]], total_ms: float, usual_ms: dict[str, float] | None
    ) -> list[Text]:
        return waterfall(stages, total_ms, cells=self._cells, blocks=self._blocks, usual_ms=usual_ms)

    def _after_first_token(self) -> Iterator[Text]:
        after = self._record.get("after") or {}
        parts = [(name, after[name]) for name in AFTER_STAGES if name in after]
        if not parts:
            return
        yield Text("")
        yield Text("  " + self._words("after"), style="bold")
        yield from self._waterfall(parts, sum(ms for _, ms in parts), self._usual_ms())
        for name, ms in after.items():
            if name not in AFTER_STAGES:
                yield from self._said(self._words("meanwhile", stage=name, ms=ms_text(ms)), style="dim")

    def _attempts(self) -> Iterator[Text]:
        attempts = self._record.get("attempts") or []
        if len(attempts) < 2:
            return
        yield Text("")
        yield Text("  " + self._words("attempts"), style="bold")
        for number, attempt in enumerate(attempts, 1):
            ended = attempt.get("error") or "ok"
            status = f", status {attempt['status']}" if attempt.get("status") else ""
            yield Text(f"  {attempt.get('number', number)}. {attempt.get('upstream')}: {ended}{status}")

    def _engine_and_tokens(self) -> Iterator[Text]:
        record, words = self._record, self._words
        yield Text("")
        if record.get("simulated"):
            yield from self._said(words("simulated"), style="dim")
        if engine := record.get("engine"):
            usage = engine.get("kv_usage")
            kv = "-" if usage is None else f"{usage * 100:.1f} %"
            state = {name: engine.get(name) for name in ("running", "waiting", "batch")}
            yield from self._said(words("engine", kv=kv, **state))
        tokens = [
            f"{words(f'token_{name}')} {count}"
            for name, count in (record.get("tokens") or {}).items()
            if count is not None
        ]
        if tokens:
            yield from self._said(words("tokens", tokens=words("comma").join(tokens)))
        extra = [
            words(key, ms=ms_text(record.get(key)))
            for key in ("engine_ttft_ms", "overhead_ms")
            if record.get(key) is not None
        ]
        if extra:
            yield from self._said(words("comma").join(extra))
        if record.get("trace_complete") is False:
            yield from self._said(words("incomplete"), style="dim")
