"""The entry point of the `tokenline` command: every verb visible at one glance."""

from __future__ import annotations

import os
import sqlite3
import sys
from typing import Annotated

import typer

from cli import bench, config, dashboards, doctor, keys, plans, slow, up, verify, why
from cli.errors import EXIT_CODES, CliError, Exit
from cli.plain import plain
from settings.errors import SettingsError

app = typer.Typer(
    name="tokenline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=f"""
Begin with:

\b
  tokenline up                  a gateway with a key and a model behind it
  tokenline why REQUEST_ID      where the time of one request went

Every command has --help with examples, and --json.

{EXIT_CODES}
""",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tokenline {version('tokenline')}")
        raise typer.Exit


@app.callback()
def tokenline(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One base_url for every LLM app, one timeline for every token."""


up.register(app)
app.add_typer(keys.app, name="keys", short_help="Makes, shows, changes and revokes keys of apps.")
app.add_typer(plans.app, name="plans")
app.command(epilog=why.EPILOG, short_help="Says why a request was slow, stage by stage.")(why.why)
app.command(epilog=slow.EPILOG, short_help="Lists the slowest requests.")(slow.slow)
app.command(epilog=doctor.EPILOG, short_help="Finds what keeps an app from its model.")(doctor.doctor)
app.command(epilog=verify.EPILOG, short_help="Finds out whether a gateway's figures are true.")(verify.verify)
app.add_typer(bench.app, name="bench", short_help="Load tests, samplings, comparisons, reports.")
app.add_typer(dashboards.app, name="dashboards", short_help="Prometheus rules and Grafana dashboards.")
app.add_typer(config.app, name="config", short_help="Shows, explains and reloads the configuration.")


def main() -> None:
    """Parses the command line and runs one verb; a fault is one line on standard error and an exit code."""
    try:
        app()
    except CliError as error:
        _fail(str(error), error.code)
    except SettingsError as error:
        _fail(str(error), Exit.USAGE)
    except sqlite3.Error as error:
        _fail(
            f"a file in the state folder can't be used: {error}; TOKENLINE_STATE_DIR names another folder", Exit.FAILURE
        )
    except UnicodeEncodeError:
        _fail("an argument is not valid UTF-8", Exit.USAGE)
    except Exception as error:
        if os.environ.get("TOKENLINE_TRACEBACK"):
            raise
        _fail(
            f"{type(error).__name__}: {error}. This is a fault of tokenline; TOKENLINE_TRACEBACK=1 shows where",
            Exit.FAILURE,
        )


def _fail(message: str, code: Exit) -> None:
    sys.stderr.write(plain(f"tokenline: {message}\n"))
    raise SystemExit(int(code))
