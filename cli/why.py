"""`tokenline why`: the verdict and the timeline of one request, or the verdict of a window."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.durations import window_of
from cli.errors import EXIT_CODES, CliError, Exit
from cli.language import Language, language_of
from cli.options import Config, Json, Lang, OpsUrl

PATIENCE_SECONDS = 2.0
EPILOG = f"""
Examples:

\b
  tokenline why req_0c1f...            the id in the x-request-id header of any answer
  tokenline why my-own-id-17           or the id that the client sent
  tokenline why 4bf92f3577b34da6...    or the trace id
  tokenline why req_0c1f... --json | jq .verdict
  tokenline why --window 1h            what was slow in the last hour, and why
  tokenline why --window 24h --model smollm2

{EXIT_CODES}
"""


def why(
    request_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Request id, the client's own id, or trace id.")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", metavar="TIME", help="Instead of one request, this time: 15m, 1h, 7d.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="M", help="With --window: only this model.")] = None,
    lang: Lang = None,
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Says why a request was slow, and shows where its time went, stage by stage.

    The stages and `unaccounted` sum to the time to the first token (of a whole answer: to its end). With --window:
    what the slowest 1 % of a time have that the others have not.
    """
    from cli.ops import ops_client

    if (request_id is None) == (window is None):
        raise CliError("why wants either the ID of a request or --window TIME, such as --window 1h", Exit.USAGE)
    if request_id is not None and model is not None:
        raise CliError("--model goes with --window; a request has one model", Exit.USAGE)
    language = language_of(lang, os.environ)
    if window is not None:
        asked: dict[str, Any] = {"window": window_of("--window", window), "lang": language}
        if model:
            asked["model"] = model
        _show_window(ops_client(ops_url, config).request("GET", "/window", params=asked), language, as_json)
    elif request_id is not None:
        client = ops_client(ops_url, config)
        path = f"/requests/{quote(request_id, safe='')}"
        matches = find_request(lambda: client.request("GET", path, params={"lang": language}), request_id)
        _show_request(matches, language, as_json)


def _show_request(matches: list[dict[str, Any]], language: Language, as_json: bool) -> None:
    from cli.output import console, print_json, say
    from cli.story import show_request

    newest, *others = matches
    other_ids = [other["request_id"] for other in others]
    if as_json:
        print_json({**newest, "other_matches": other_ids})
        return
    show_request(newest, console(), language)
    if other_ids:
        say(f"{len(other_ids)} more with this id, newest first: {', '.join(other_ids[:10])}")


def _show_window(found: dict[str, Any], language: Language, as_json: bool) -> None:
    from cli.output import console, print_json
    from cli.story import MAX_CELLS, print_lines
    from cli.window_story import window_story_of

    if as_json:
        print_json(found)
        return
    out = console()
    print_lines(window_story_of(found, cells=min(out.width, MAX_CELLS), language=language), out)


def find_request(
    ask: Callable[[], dict[str, Any]],
    request_id: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[dict[str, Any]]:
    """Every match, newest first. What isn't known is asked for again for 2 s: it may have ended this moment."""
    deadline = clock() + PATIENCE_SECONDS
    while True:
        try:
            matches: list[dict[str, Any]] = ask().get("matches") or []
        except CliError as error:
            if error.code is not Exit.NOT_FOUND:
                raise
            matches = []
        if matches:
            return matches
        if clock() >= deadline:
            raise CliError(
                f"no request {request_id!r} is known. It may still be running, be older than what is kept "
                "(tracing.store_max_rows), or have gone through another gateway",
                Exit.NOT_FOUND,
            )
        sleep(0.2)
