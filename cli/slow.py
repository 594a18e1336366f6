"""`tokenline slow`: the slowest requests, the stage that took most of each, and the cause."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from cli.durations import window_of
from cli.errors import EXIT_CODES
from cli.language import language_of
from cli.options import Config, Json, Lang, OpsUrl
from cli.words import Words

FIRST_CELLS = 63
"""What the columns before the cause take."""
TIME_CELLS, MODEL_CELLS = 96, 112
"""From these widths on there are columns for the time and the model."""
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
    lang: Lang = None,
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Lists the slowest requests: by TTFT for streams, by E2E for whole answers, with the largest stage and the cause.

    `tokenline why ID` says more of one of them.
    """
    from cli.ops import ops_client
    from cli.output import print_json, say

    words = Words(language_of(lang, os.environ))
    asked: dict[str, Any] = {"window": window_of("--window", window), "limit": limit}
    if model:
        asked["model"] = model
    found = ops_client(ops_url, config).request("GET", "/slow", params=asked)
    if as_json:
        print_json(found)
    elif not found.get("requests"):
        say(words("no_request", window=window, model=words("of_model", model=model) if model else ""))
    else:
        _show(found["requests"], words)


def _show(requests: list[dict[str, Any]], words: Words) -> None:
    from rich.table import Table

    from cli.output import console

    out = console()
    shown = 4 + (out.width >= TIME_CELLS) + (out.width >= MODEL_CELLS)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(words("id"), no_wrap=True, min_width=28)
    table.add_column(words("slow_by"), justify="right", no_wrap=True, min_width=12)
    table.add_column(words("largest"), no_wrap=True, min_width=20, overflow="ellipsis")
    table.add_column(words("cause"), no_wrap=True, overflow="ellipsis", max_width=max(10, out.width - FIRST_CELLS))
    for name in ("at", "model")[: shown - 4]:
        table.add_column(words(name), no_wrap=True, overflow="ellipsis")
    for request in requests:
        table.add_row(*row_of(request)[:shown])
    out.print(table)


def row_of(request: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
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
    cause = request.get("cause") or "-"
    slow_by = "-" if ms is None else f"{name} {ms:.0f} ms"
    return (
        request["request_id"],
        slow_by,
        largest,
        cause,
        when(request.get("started"))[11:19],
        str(request.get("model")),
    )
