"""`tokenline keys`: create, list, show, set, rotate and revoke tenant keys, and see what they used."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from cli import keys_set
from cli.errors import EXIT_CODES, CliError, Exit
from cli.key_access import Record, keys_of
from cli.options import Config, Json, OpsUrl

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Creates, lists, changes, rotates and revokes the keys that apps use.",
    epilog=f"""
With --ops-url or TOKENLINE_OPS_URL a running gateway is asked (with the admin key from TOKENLINE_ADMIN_KEY or the
state folder); otherwise the key store of the configuration is used directly. Either way a running gateway follows
within 5 seconds.

{EXIT_CODES}
""",
)
Which = Annotated[str, typer.Argument(metavar="ID|ALIAS", help="Which key.")]
LIMITS = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "concurrent_requests": "at once",
    "tokens_per_day": "tokens/day",
    "tokens_per_month": "tokens/month",
}


def _limit(option: str, what: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(option, min=1, metavar="N", help=f"{what} [default: the plan's]")
    return found


@app.command(
    epilog=f"""
Examples:

\b
  tokenline keys create --alias mobile-app
  tokenline keys create --alias ci --team build --models smollm2 --expires 30d
  tokenline keys create --alias trial --plan free --rpm 60 --monthly 1000000
  KEY=$(tokenline keys create --alias job --json | jq -r .secret)

{EXIT_CODES}
"""
)
def create(
    alias: Annotated[str, typer.Option("--alias", metavar="NAME", help="Who uses it; shown in traces.")],
    team: Annotated[str | None, typer.Option("--team", metavar="NAME", help="Team; a label of metrics.")] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="NAME", help="A table [plans.NAME]. [default: keys.default_plan]")
    ] = None,
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="Public models that it may use. [default: all]")
    ] = None,
    rpm: Annotated[int | None, _limit("--rpm", "Requests per minute.")] = None,
    tpm: Annotated[int | None, _limit("--tpm", "Tokens per minute, input and output.")] = None,
    concurrency: Annotated[int | None, _limit("--concurrency", "Requests in flight at once.")] = None,
    daily: Annotated[int | None, _limit("--daily", "Tokens per day (UTC).")] = None,
    monthly: Annotated[int | None, _limit("--monthly", "Tokens per month (UTC).")] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="Ends after 12h, 30d, 8w. [default: never]")
    ] = None,
    tags: Annotated[str | None, typer.Option("--tags", metavar="A,B", help="Words to find it by.")] = None,
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Makes a key. Its secret is shown this once and can't be shown again."""
    from cli.durations import seconds_of

    names = _list_of(models)
    if models is not None and not names:
        raise CliError("--models: name at least one model, or leave the option out to allow all", Exit.USAGE)
    given = dict(zip(LIMITS, (rpm, tpm, concurrency, daily, monthly), strict=True))
    asked = {
        "alias": alias,
        "team": team,
        "plan": plan,
        "models": names,
        "limits": {name: limit for name, limit in given.items() if limit is not None},
        "expires_ns": time.time_ns() + int(seconds_of("--expires", expires) * 1e9) if expires else None,
        "tags": _list_of(tags),
    }
    _show_secret(keys_of(ops_url, config).create(asked), as_json)


@app.command(
    name="list",
    epilog=f"""
Examples:

\b
  tokenline keys list
  tokenline keys list --json | jq '.keys[] | select(.revoked_ns == null) | .alias'

{EXIT_CODES}
""",
)
def list_keys(ops_url: OpsUrl = None, config: Config = None, as_json: Json = False) -> None:
    """Lists every key, newest first. Secrets are not kept, so none is shown."""
    from cli.output import print_json, say
    from cli.tables import print_table

    found = keys_of(ops_url, config).list()
    if as_json:
        print_json({"keys": found})
        return
    if not found:
        say("there is no key yet; `tokenline keys create --alias NAME` makes one")
        return
    print_table(
        ("id", "alias", "team", "models", "plan", "limits", "state"),
        (
            (
                record["id"],
                record["alias"],
                record.get("team") or "-",
                ", ".join(record.get("models") or ()) or "all",
                record.get("plan") or "-",
                limits_in_words(record.get("limits") or {}),
                state_of(record, time.time_ns()),
            )
            for record in found
        ),
    )


@app.command(
    epilog=f"""
Examples:

\b
  tokenline keys show mobile-app
  tokenline keys show key_0b5c... --json

{EXIT_CODES}
"""
)
def show(id_or_alias: Which, ops_url: OpsUrl = None, config: Config = None, as_json: Json = False) -> None:
    """Shows all that is known of a key, which is not its secret."""
    from cli.output import print_json
    from cli.story import when
    from cli.tables import print_table

    record = keys_of(ops_url, config).show(id_or_alias)
    if as_json:
        print_json(record)
        return
    rows = [
        ("id", record["id"]),
        ("alias", record["alias"]),
        ("team", record.get("team") or "-"),
        ("models", ", ".join(record["models"]) or "all"),
        ("plan", record.get("plan") or "-"),
        ("own limits", limits_in_words(record["limits"])),
        ("tags", ", ".join(record["tags"]) or "-"),
        ("state", state_of(record, time.time_ns())),
        ("created", when(record["created_ns"])[:16]),
    ]
    if record.get("rotated_ns"):
        rows.append(("rotated", when(record["rotated_ns"])[:16]))
        rows.append(("old secret until", when(record["previous_until_ns"])[:16]))
    print_table(("what", "value"), rows)


app.command(name="set", epilog=keys_set.EPILOG)(keys_set.set_key)


@app.command(
    epilog=f"""
Examples:

\b
  tokenline keys rotate mobile-app --grace 24h
  KEY=$(tokenline keys rotate job --json | jq -r .secret)

{EXIT_CODES}
"""
)
def rotate(
    id_or_alias: Which,
    grace: Annotated[
        str | None, typer.Option("--grace", metavar="TIME", help="The old secret works on for 12h, 7d. [default: not]")
    ] = None,
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Gives a key a new secret; limits, models and usage stay its own."""
    from cli.durations import seconds_of

    seconds = seconds_of("--grace", grace) if grace else 0.0
    _show_secret(keys_of(ops_url, config).rotate(id_or_alias, seconds), as_json)


@app.command(
    epilog=f"""
Examples:

\b
  tokenline keys revoke mobile-app
  tokenline keys revoke key_0b5c... --ops-url http://gateway.internal:9464

{EXIT_CODES}
"""
)
def revoke(id_or_alias: Which, ops_url: OpsUrl = None, config: Config = None, as_json: Json = False) -> None:
    """Ends a key for good, within 5 seconds everywhere."""
    from cli.output import print_json

    ended = keys_of(ops_url, config).revoke(id_or_alias)
    if as_json:
        print_json(ended)
    else:
        typer.echo(f"{ended['id']} {ended['alias']}: revoked")


@app.command(
    short_help="Shows requests and tokens by key, team or model.",
    epilog=f"""
Examples:

\b
  tokenline keys usage --window 24h
  tokenline keys usage --window 30d --by team --json

{EXIT_CODES}
""",
)
def usage(
    window: Annotated[str, typer.Option("--window", metavar="TIME", help="How far back: 1h, 24h, 30d.")] = "24h",
    by: Annotated[Literal["key", "team", "model"], typer.Option("--by", help="What is summed up.")] = "key",
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Shows requests and tokens by key, team or model; of answers without a count the token events."""
    from cli.durations import window_of
    from cli.output import print_json, say
    from cli.tables import print_table

    found = keys_of(ops_url, config).usage(window_of("--window", window), by)
    if as_json:
        print_json(found)
        return
    if not found["usage"]:
        say(f"no key was used in the last {window}")
        return
    columns = tuple(name.removesuffix("_tokens").removesuffix("_alias") for name in found["usage"][0])
    print_table(columns, (tuple(str(value) for value in row.values()) for row in found["usage"]))


def _list_of(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _show_secret(made: Record, as_json: bool) -> None:
    from cli.output import print_json, say

    if as_json:
        print_json(made)
        return
    say(f"{made['id']} {made['alias']}: keep this secret now, it is not shown again")
    typer.echo(made["secret"])


def limits_in_words(limits: Record) -> str:
    """`60 requests/min, 10,000 tokens/day`."""
    return ", ".join(f"{limits[name]:,} {words}" for name, words in LIMITS.items() if limits.get(name)) or "-"


def state_of(record: Record, now_ns: int) -> str:
    """Whether a key works, in words."""
    from cli.story import when

    if record.get("revoked_ns"):
        return f"revoked {when(record['revoked_ns'])[:16]}"
    expires_ns = record.get("expires_ns")
    if expires_ns is None:
        return "works"
    return f"{'expired' if expires_ns <= now_ns else 'works until'} {when(expires_ns)[:16]}"
