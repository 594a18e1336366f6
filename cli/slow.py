"""`tokenline slow`: the slowest requests and the stage that took most of each."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.errors import EXIT_CODES
from cli.options import Config, Json, OpsUrl

WIDE_CELLS = 96
"""From this width on the model has a column."""
EPILOG = f"""
Examples:

\b
  tokenline slow                       the slowest of the last hour
  tokenline slow --window 24h --model smollm2 -n 50
  tokenline slow --json | jq '.requests[0].request_id'

{EXIT_CODES}
"""


def slow(
    window: Annotated[str, typer.Option("--window", metavar="TIME", help="How far back: 15m, 1h, 7d.")] = "1h",
    model: Annotated[str | None, typer.Option("--model", metavar="M", help="Only this public model.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")] = 20,
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Lists the slowest requests: by TTFT for streams, by E2E for whole answers."""
    from cli.durations import seconds_of
    from cli.ops import ops_client
    from cli.output import print_json, say

    seconds = max(1, round(seconds_of("--window", window)))
    asked: dict[str, Any] = {"window": f"{seconds}s", "limit": limit}
    if model:
        asked["model"] = model
    found = ops_client(ops_url, config).request("GET", "/slow", params=asked)
    if as_json:
        print_json(found)
    elif not found.get("requests"):
        say(f"no request ended in the last {window}" + (f" for model {model}" if model else ""))
    else:
        _show(found["requests"])


def _show(requests: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from cli.output import console

    out = console()
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("request id", no_wrap=True, min_width=28)
    table.add_column("at", no_wrap=True, min_width=8)
    table.add_column("slow by", justify="right", no_wrap=True, min_width=12)
    table.add_column("largest stage / end", no_wrap=True, min_width=20, overflow="ellipsis")
    wide = out.width >= WIDE_CELLS
    if wide:
        table.add_column("model", no_wrap=True, overflow="ellipsis")
    for request in requests:
        cells = row_of(request)
        table.add_row(*(cells if wide else cells[:-1]))
    out.print(table)


def row_of(request: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """The cells of one line. What failed shows how, instead of its largest stage."""
    from cli.story import when

    name, ms = ("TTFT", request.get("ttft_ms")) if request.get("ttft_ms") is not None else ("E2E", request["e2e_ms"])
    stages = request.get("stages") or {}
    total_ms = request.get("total_ms")
    largest = "-"
    if stages and total_ms:
        stage = max(stages, key=stages.__getitem__)
        largest = f"{stage} {stages[stage] / total_ms * 100:.0f} %"
    if request.get("outcome") != "ok":
        largest = str(request.get("outcome"))
    clock = when(request.get("started"))[11:19]
    slow_by = "-" if ms is None else f"{name} {ms:.0f} ms"
    return request["request_id"], clock, slow_by, largest, str(request.get("model"))
