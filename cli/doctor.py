"""`tokenline doctor`: from a client's side, what keeps base_url, key and model from working, and what to do."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from cli.errors import CliError, Exit
from cli.language import language_of
from cli.options import Json, Lang

EPILOG = """
It looks at base_url, key and model as the app is given them, at proxy variables and second credentials, and at the way
there; then it asks one short question whole and one streamed (at most 80 tokens in all), and measures whether the
stream's events come one by one. What it repairs on the way (a stray space, a wrong path) it says, and goes on. No key
is ever printed, only its fingerprint.

Examples:

\b
  tokenline doctor                                     OPENAI_BASE_URL and OPENAI_API_KEY, as an app would read them
  tokenline doctor --base-url http://127.0.0.1:8080/api --key-env TOKENLINE_API_KEY --model smollm2
  tokenline doctor --surface anthropic                 ANTHROPIC_BASE_URL, ANTHROPIC_AUTH_TOKEN or ANTHROPIC_API_KEY
  tokenline doctor --base-url http://127.0.0.1:11434/v1 --no-key --model llama3.2
  tokenline doctor --json | jq '.findings[] | select(.result == "fail") | .fix'

Exit codes: 0 success (all is well), 1 something was found, 2 wrong arguments.
"""


def doctor(
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url",
            metavar="URL",
            help="As the app is given it. [default: OPENAI_BASE_URL or ANTHROPIC_BASE_URL, else "
            "http://127.0.0.1:8080/api]",
        ),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(
            "--key-env",
            metavar="NAME",
            help="Environment variable with the key. [default: what the surface's SDK reads, else TOKENLINE_API_KEY]",
        ),
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="The endpoint takes no key.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="Model. [default: the only one that is listed]")
    ] = None,
    surface: Annotated[
        Literal["openai", "anthropic"], typer.Option("--surface", help="How the app speaks.")
    ] = "openai",
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="For one request.")] = "60s",
    lang: Lang = None,
    as_json: Json = False,
) -> None:
    """Finds what keeps an app from its model: base_url, key, proxies, certificates, buffering; with the fix of each.

    Works with any OpenAI- or Anthropic-style endpoint. Exit code 1 when there is something to change.
    """
    import asyncio

    from cli.doctor_show import as_builtins, progress_line, show_report
    from cli.durations import seconds_of
    from cli.output import print_json
    from loadtest.doctor.examination import examine
    from loadtest.doctor.given import given_by
    from tracing.clock import SystemClock

    if no_key and key_env is not None:
        raise CliError("--no-key and --key-env contradict each other", Exit.USAGE)
    language = language_of(lang, os.environ)
    given = given_by(surface, base_url, key_env, model, os.environ, no_key=no_key)
    seconds = seconds_of("--timeout", timeout)
    with progress_line() as progress:
        report = asyncio.run(examine(given, SystemClock(), timeout_seconds=seconds, progress=progress))
    if as_json:
        print_json(as_builtins(report, language))
    else:
        show_report(report, language)
    if report.troubles:
        raise typer.Exit(int(Exit.FAILURE))
