"""What `why` shows of one request: its times, its stages as a waterfall, its attempts, the engine it met."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from cli.chart import amount, in_time_order, waterfall

DEFINITIONS = (
    "TTFT: ingress to first token written (streams). E2E: ingress to last byte.",
    "TPOT: (last token - first token) / (output tokens - 1).",
)
AFTER_STAGES = ("streaming", "closing")

Record = dict[str, Any]
"""One request as the admin API gives it."""


def show_request(record: Record, console: Console) -> None:
    """Prints the whole page."""
    for line in story_of(record, cells=min(console.width, 120), blocks=console.encoding.lower().startswith("utf")):
        console.print(line, no_wrap=True, overflow="ellipsis")


def story_of(record: Record, *, cells: int, blocks: bool = True) -> Iterator[Text]:
    """The page, line by line."""
    yield from _header(record)
    yield from _stages(record, cells, blocks)
    yield from _after_first_token(record, cells, blocks)
    yield from _attempts(record)
    yield from _engine_and_tokens(record)


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


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _header(record: Record) -> Iterator[Text]:
    yield Text(str(record["request_id"]), style="bold")
    kind = "stream" if record.get("stream") else "whole answer"
    ended = f"{record.get('outcome')}, status {record.get('status')}"
    if record.get("error_code"):
        ended += f", {record['error_code']}"
    yield Text(f"  {record.get('model')} by upstream {record.get('upstream')}, {record.get('surface')}, {kind}")
    yield Text(f"  {ended}, {when(record.get('started'))}")
    if record.get("client_request_id"):
        yield Text(f"  client's id {record['client_request_id']}")
    yield Text(f"  trace {record.get('trace_id')}")
    yield Text("")
    times = Text("  ")
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms")):
        times.append(f"{name} ").append(_ms(record.get(key)), style="bold").append("   ")
    yield times
    for line in DEFINITIONS:
        yield Text(f"  {line}", style="dim")


def _stages(record: Record, cells: int, blocks: bool) -> Iterator[Text]:
    stages = in_time_order(record.get("stages") or {})
    total_ms = record.get("total_ms")
    yield Text("")
    if not stages or not total_ms:
        yield Text("  no stage was measured: the request never reached an upstream")
        return
    what = "TTFT" if record.get("ttft_ms") is not None else "E2E"
    yield Text(f"  Stages that make up {what}", style="bold")
    unaccounted_ms = record.get("unaccounted_ms")
    if unaccounted_ms is not None:
        stages.append(("unaccounted", unaccounted_ms))
    yield from waterfall(stages, total_ms, cells=cells, blocks=blocks)
    yield Text("  " + "total".ljust(cells - 2 - len(amount(0, 1))) + amount(total_ms, total_ms), style="bold")
    if unaccounted_ms is None:
        yield Text("  transit is the rest by construction (the engine's clock is another's)", style="dim")
    for name in record.get("anomalies") or ():
        yield Text(f"  {name} came out negative; it is shown as it is", style="red")


def _after_first_token(record: Record, cells: int, blocks: bool) -> Iterator[Text]:
    after = record.get("after") or {}
    parts = [(name, after[name]) for name in AFTER_STAGES if name in after]
    if not parts:
        return
    rest_ms = sum(ms for _, ms in parts)
    yield Text("")
    yield Text("  After the first token", style="bold")
    yield from waterfall(parts, rest_ms, cells=cells, blocks=blocks)
    for name, ms in after.items():
        if name not in AFTER_STAGES:
            yield Text(f"  meanwhile {name} {_ms(ms)}", style="dim")


def _attempts(record: Record) -> Iterator[Text]:
    attempts = record.get("attempts") or []
    if len(attempts) < 2:
        return
    yield Text("")
    yield Text("  Attempts", style="bold")
    for number, attempt in enumerate(attempts, 1):
        ended = attempt.get("error") or "ok"
        status = f", status {attempt['status']}" if attempt.get("status") else ""
        yield Text(f"  {attempt.get('number', number)}. {attempt.get('upstream')}: {ended}{status}")


def _engine_and_tokens(record: Record) -> Iterator[Text]:
    yield Text("")
    engine = record.get("engine")
    if record.get("simulated"):
        yield Text("  The engine ran on the simulated device.", style="dim")
    if engine:
        usage = engine.get("kv_usage")
        kv = "-" if usage is None else f"{usage * 100:.1f} %"
        yield Text(
            f"  Engine when it was scheduled: {engine.get('running')} running, {engine.get('waiting')} waiting, "
            f"KV {kv}, batch {engine.get('batch')}"
        )
    tokens = {name: count for name, count in (record.get("tokens") or {}).items() if count is not None}
    if tokens:
        yield Text("  Tokens: " + ", ".join(f"{name} {count}" for name, count in tokens.items()))
    extra = [
        f"{words} {_ms(record.get(key))}"
        for key, words in (("engine_ttft_ms", "the engine's own TTFT"), ("overhead_ms", "the gateway's own work"))
        if record.get(key) is not None
    ]
    if extra:
        yield Text("  " + ", ".join(extra))
    if record.get("trace_complete") is False:
        yield Text("  The trace is not complete: spans of the engine are missing.", style="dim")
