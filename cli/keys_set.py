"""`tokenline keys set`: other limits, models, plan or names for a key that exists; its secret stays."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from cli.errors import EXIT_CODES, CliError, Exit
from cli.key_access import Record, keys_of
from cli.options import Config, Json, OpsUrl

NONE = "none"
EPILOG = f"""
What is not named stays as it is; `none` takes a property away (of limits: the plan's holds again).

Examples:

\b
  tokenline keys set mobile-app --rpm 120 --plan team
  tokenline keys set trial --monthly none --expires 30d
  tokenline keys set ci --models smollm2,llama
  tokenline keys set ci --models none         all models

{EXIT_CODES}
"""


def _limit(option: str, what: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(option, metavar="N|none", help=what)
    return found


def set_key(
    id_or_alias: Annotated[str, typer.Argument(metavar="ID|ALIAS", help="Which key.")],
    alias: Annotated[str | None, typer.Option("--alias", metavar="NAME", help="Another name.")] = None,
    team: Annotated[str | None, typer.Option("--team", metavar="NAME|none", help="Team; a label of metrics.")] = None,
    plan: Annotated[str | None, typer.Option("--plan", metavar="NAME|none", help="A table [plans.NAME].")] = None,
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B|none", help="Public models that it may use; none: all.")
    ] = None,
    rpm: Annotated[str | None, _limit("--rpm", "Requests per minute.")] = None,
    tpm: Annotated[str | None, _limit("--tpm", "Tokens per minute, input and output.")] = None,
    concurrency: Annotated[str | None, _limit("--concurrency", "Requests in flight at once.")] = None,
    daily: Annotated[str | None, _limit("--daily", "Tokens per day (UTC).")] = None,
    monthly: Annotated[str | None, _limit("--monthly", "Tokens per month (UTC).")] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME|none", help="Ends after 12h, 30d, 8w from now.")
    ] = None,
    tags: Annotated[str | None, typer.Option("--tags", metavar="A,B|none", help="Words to find it by.")] = None,
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Changes what a key may do, within 5 seconds everywhere. Its secret stays."""
    from cli.keys import LIMITS, limits_in_words
    from cli.output import echo, print_json

    change: Record = {} if alias is None else {"alias": alias}
    for name, text in (("team", team), ("plan", plan)):
        if text is not None:
            change[name] = None if text == NONE else text
    for name, listed in (("models", models), ("tags", tags)):
        if listed is not None:
            change[name] = _list_of(f"--{name}", listed)
    options = ("--rpm", "--tpm", "--concurrency", "--daily", "--monthly")
    texts = dict(zip(LIMITS, zip(options, (rpm, tpm, concurrency, daily, monthly), strict=True), strict=True))
    limits = {name: _limit_of(option, text) for name, (option, text) in texts.items() if text is not None}
    if limits:
        change["limits"] = limits
    if expires is not None:
        change["expires_ns"] = _expiry_of(expires)
    if not change:
        raise CliError("say what to change, such as --rpm 120; `tokenline keys set --help` lists all", Exit.USAGE)
    record = keys_of(ops_url, config).alter(id_or_alias, change)
    if as_json:
        print_json(record)
        return
    models_now = ", ".join(record["models"]) or "all"
    echo(
        f"{record['id']} {record['alias']}: team {record.get('team') or '-'}, plan {record.get('plan') or '-'}, "
        f"models {models_now}, own limits {limits_in_words(record['limits'])}"
    )


def _list_of(option: str, text: str) -> list[str]:
    if text == NONE:
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise CliError(f"{option}: name at least one, or write none", Exit.USAGE)
    return names


def _limit_of(option: str, text: str) -> int | None:
    if text == NONE:
        return None
    if not text.isascii() or not text.isdigit() or not int(text):
        raise CliError(f"{option} {text!r}: write a whole number from 1, or none", Exit.USAGE)
    return int(text)


def _expiry_of(text: str) -> int | None:
    from cli.durations import seconds_of

    return None if text == NONE else time.time_ns() + int(seconds_of("--expires", text) * 1e9)
