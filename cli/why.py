"""`tokenline why`: the timeline of one request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.errors import EXIT_CODES, CliError, Exit
from cli.options import Config, Json, OpsUrl

PATIENCE_SECONDS = 2.0
EPILOG = f"""
Examples:

\b
  tokenline why req_0c1f...            the id in the x-request-id header of any answer
  tokenline why my-own-id-17           or the id that the client sent
  tokenline why 4bf92f3577b34da6...    or the trace id
  tokenline why req_0c1f... --json | jq .stages

{EXIT_CODES}
"""


def why(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Request id, the client's own id, or trace id.")],
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Shows where the time of one request went, stage by stage.

    The stages and `unaccounted` sum to the time to the first token (of a whole answer: to its end).
    """
    from cli.ops import ops_client
    from cli.output import console, print_json, say
    from cli.story import show_request

    client = ops_client(ops_url, config)
    matches = find_request(lambda: client.request("GET", f"/requests/{quote(request_id, safe='')}"), request_id)
    newest, *others = matches
    other_ids = [other["request_id"] for other in others]
    if as_json:
        print_json({**newest, "other_matches": other_ids})
        return
    show_request(newest, console())
    if other_ids:
        say(f"{len(other_ids)} more with this id, newest first: {', '.join(other_ids[:10])}")


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
