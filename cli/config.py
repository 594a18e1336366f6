"""`tokenline config`: what is in effect and where it came from; what can be set; taking a new one into force."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from cli.errors import EXIT_CODES
from cli.options import Config, Json, OpsUrl

HIDDEN = "(set, hidden)"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Shows the configuration in effect or everything that can be set, or has a running gateway reload it.",
    epilog=EXIT_CODES,
)


@app.command(
    epilog=f"""
Examples:

\b
  tokenline config show                            what is in effect here
  tokenline config show --config prod.toml --json
  TOKENLINE_SCHEDULER__MAX_NUM_SEQS=64 tokenline config show

{EXIT_CODES}
"""
)
def show(config: Config = None, as_json: Json = False) -> None:
    """Prints every effective key, its value and where it came from. Secrets are hidden."""
    from cli.kv_memory import kv_memory
    from cli.output import console, print_json, say_notes
    from settings.loader import effective_values, load_settings

    loaded = load_settings(config)
    cache = kv_memory(loaded.settings)
    shown = {
        ".".join(key): HIDDEN if secret and value is not None else value
        for key, value, secret in effective_values(loaded.settings)
    }
    if as_json:
        print_json(
            {
                "file": str(loaded.file) if loaded.file else None,
                "state_dir": str(loaded.settings.state_dir),
                "keys": {key: {"value": value, "origin": loaded.origins[key]} for key, value in shown.items()},
                "kv_cache": None
                if cache is None
                else {"bytes": cache.size, "before_weights": cache.is_before_weights, "meaning": cache.words},
                "notes": list(loaded.notes),
            }
        )
        return
    from rich.text import Text

    out = console()
    out.print(f"file       {loaded.file or 'none; ./tokenline.toml would be read'}", soft_wrap=True)
    out.print(f"state_dir  {loaded.settings.state_dir}", soft_wrap=True)
    if cache is not None:
        out.print(f"KV cache   {cache.words}", soft_wrap=True)
    out.print()
    for key, value in shown.items():
        origin = loaded.origins[key]
        text = "not set" if value is None else value if value == HIDDEN else json.dumps(value)
        line = Text(f"{key} = {text}", style="dim" if origin == "default" else "")
        if origin != "default":
            line.append(f"   ({origin})", style="cyan")
        out.print(line, soft_wrap=True)
    say_notes(loaded.notes)


@app.command(
    short_help="Has a running gateway read its configuration again.",
    epilog=f"""
Examples:

\b
  tokenline config reload
  tokenline config reload --ops-url http://gateway.internal:9464 --json | jq .needs_restart
  kill -HUP $(cat ~/.local/state/tokenline/gateway.lock)     the same, without an answer

{EXIT_CODES}
""",
)
def reload(ops_url: OpsUrl = None, config: Config = None, as_json: Json = False) -> None:
    """Has a running gateway read its configuration again: models, upstreams, plans, objectives, limits.

    Requests that run are not touched. A configuration that can't be used changes nothing.
    """
    from cli.ops import ops_client
    from cli.output import echo, print_json

    found = ops_client(ops_url, config).request("POST", "/reload")
    if as_json:
        print_json(found)
        return
    lines = [
        f"{words}: {', '.join(found[name])}"
        for name, words in (
            ("added", "added"),
            ("removed", "removed"),
            ("changed", "changed"),
            ("needs_restart", "not taken, needs a restart"),
            ("late", "not confirmed yet by"),
        )
        if found.get(name)
    ]
    echo("\n".join(lines) or "nothing is different")


@app.command(
    short_help="Prints every key with its meaning and default.",
    epilog=f"""
Examples:

\b
  tokenline config schema | less
  tokenline config schema --json | jq '.[].key'

{EXIT_CODES}
""",
)
def schema(
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/configuration.md.")] = False,
) -> None:
    """Prints every key with its type, default, environment variable and meaning."""
    from cli.output import print_json
    from settings.catalogue import SPELLINGS, catalogue

    if as_json:
        print_json([_as_json(key) for key in catalogue()])
    elif as_markdown:
        from cli.reference import configuration_page

        typer.echo(configuration_page(), nl=False)
    else:
        for key in catalogue():
            typer.echo(f"{key.dotted} = {key.default}\n    {key.meaning} ({key.allowed})\n    {key.environment}")
        for other, kept in SPELLINGS.items():
            typer.echo(f"{'.'.join(other)}\n    Another spelling of {'.'.join(kept)}.")


def _as_json(key: Any) -> dict[str, Any]:
    return {
        "key": key.dotted,
        "allowed": key.allowed,
        "default": key.default,
        "environment": key.environment,
        "meaning": key.meaning,
        "secret": key.secret,
    }
