"""`tokenline keys`: create, list and revoke tenant keys, in the state folder or through a running gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import quote

import typer

from cli.errors import EXIT_CODES, CliError, Exit
from cli.options import Config, Json, OpsUrl

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Creates, lists and revokes the keys that apps use.",
    epilog=f"""
With --ops-url or TOKENLINE_OPS_URL a running gateway is asked (with the admin key from TOKENLINE_ADMIN_KEY or the
state folder); otherwise the key store in the state folder is used directly. Either way a running gateway follows
within 5 seconds.

{EXIT_CODES}
""",
)

Record = dict[str, Any]


class Keys(Protocol):
    """Where keys live: a store or a gateway. Records are as the admin API gives them."""

    def create(self, alias: str, team: str | None, models: tuple[str, ...], expires_ns: int | None) -> Record: ...
    def list(self) -> list[Record]: ...
    def revoke(self, id_or_alias: str) -> Record: ...


class StoredKeys:
    """The key store in the state folder."""

    def __init__(self, config: Path | None) -> None:
        import sqlite3

        from cli.ops import load_for_asking
        from gateway.keys.store import KeyStore
        from settings.paths import prepare_state_dir

        settings = load_for_asking(config).settings
        prepare_state_dir(settings)
        self._path = settings.keys_path
        self._unusable = sqlite3.Error
        self._store = self._doing(lambda: KeyStore(settings.keys_path))

    def _doing(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except self._unusable as error:
            raise CliError(f"the key store {self._path} can't be used: {error}") from None
        except LookupError as error:
            raise CliError(str(error.args[0]), Exit.NOT_FOUND) from None
        except ValueError as error:
            raise CliError(str(error)) from None

    def create(self, alias: str, team: str | None, models: tuple[str, ...], expires_ns: int | None) -> Record:
        secret, record = self._doing(lambda: self._store.create(alias, team, models, expires_ns))
        return {"secret": secret, **record.public()}

    def list(self) -> list[Record]:
        return [record.public() for record in self._doing(self._store.list)]

    def revoke(self, id_or_alias: str) -> Record:
        record: Record = self._doing(lambda: self._store.revoke(id_or_alias)).public()
        return record


class GatewayKeys:
    """The admin API of a running gateway."""

    def __init__(self, ops_url: str, config: Path | None) -> None:
        from cli.ops import ops_client

        self._client = ops_client(ops_url, config)

    def create(self, alias: str, team: str | None, models: tuple[str, ...], expires_ns: int | None) -> Record:
        asked = {"alias": alias, "team": team, "models": list(models), "expires_ns": expires_ns}
        return self._client.request("POST", "/keys", json=asked)

    def list(self) -> list[Record]:
        found: list[Record] = self._client.request("GET", "/keys")["keys"]
        return found

    def revoke(self, id_or_alias: str) -> Record:
        return self._client.request("DELETE", f"/keys/{quote(id_or_alias, safe='')}")


def _keys(ops_url: str | None, config: Path | None) -> Keys:
    return GatewayKeys(ops_url, config) if ops_url else StoredKeys(config)


@app.command(
    epilog=f"""
Examples:

\b
  tokenline keys create --alias mobile-app
  tokenline keys create --alias ci --team build --models smollm2 --expires 30d
  KEY=$(tokenline keys create --alias job --json | jq -r .secret)

{EXIT_CODES}
"""
)
def create(
    alias: Annotated[str, typer.Option("--alias", metavar="NAME", help="Who uses it; shown in traces.")],
    team: Annotated[str | None, typer.Option("--team", metavar="NAME", help="Team; a label of metrics.")] = None,
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="Public models that it may use. [default: all]")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="Ends after 12h, 30d, 8w. [default: never]")
    ] = None,
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Makes a key. Its secret is shown this once and can't be shown again."""
    from cli.durations import seconds_of
    from cli.output import print_json, say

    names = tuple(name.strip() for name in (models or "").split(",") if name.strip())
    if models is not None and not names:
        raise CliError("--models: name at least one model, or leave the option out to allow all", Exit.USAGE)
    expires_ns = time.time_ns() + int(seconds_of("--expires", expires) * 1e9) if expires else None
    made = _keys(ops_url, config).create(alias, team, names, expires_ns)
    if as_json:
        print_json(made)
        return
    say(f"{made['id']} {made['alias']}: keep this secret now, it is not shown again")
    typer.echo(made["secret"])


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
    from cli.output import console, print_json, say

    found = _keys(ops_url, config).list()
    if as_json:
        print_json({"keys": found})
        return
    if not found:
        say("there is no key yet; `tokenline keys create --alias NAME` makes one")
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("id", "alias", "team", "models", "state"):
        table.add_column(column, overflow="fold", no_wrap=column == "id")
    for record in found:
        table.add_row(
            record["id"],
            record["alias"],
            record.get("team") or "-",
            ", ".join(record.get("models") or ()) or "all",
            state_of(record, time.time_ns()),
        )
    console().print(table)


@app.command(
    epilog=f"""
Examples:

\b
  tokenline keys revoke mobile-app
  tokenline keys revoke key_0b5c... --ops-url http://gateway.internal:9464

{EXIT_CODES}
"""
)
def revoke(
    id_or_alias: Annotated[str, typer.Argument(metavar="ID|ALIAS", help="Which key.")],
    ops_url: OpsUrl = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Ends a key for good, within 5 seconds everywhere."""
    from cli.output import print_json

    ended = _keys(ops_url, config).revoke(id_or_alias)
    if as_json:
        print_json(ended)
    else:
        typer.echo(f"{ended['id']} {ended['alias']}: revoked")


def state_of(record: Record, now_ns: int) -> str:
    """Whether a key works, in words."""
    from cli.story import when

    if record.get("revoked_ns"):
        return f"revoked {when(record['revoked_ns'])[:16]}"
    expires_ns = record.get("expires_ns")
    if expires_ns is None:
        return "works"
    return f"{'expired' if expires_ns <= now_ns else 'works until'} {when(expires_ns)[:16]}"
