"""`tokenline verify`: timing conformance of any OpenAI-compatible gateway, from outside."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.errors import EXIT_CODES, CliError, Exit
from cli.options import Config, Json, OpsUrl

MODEL = "tokenline-verify"
EPILOG = f"""
It starts an upstream whose every delay is known, says how to point the gateway at it, and waits until the gateway
leads there. Then it asks through the gateway and compares what it got, and what the gateway publishes, with what the
upstream did. Nobody else may use the gateway meanwhile: the figures on its page are counted.

Examples:

\b
  tokenline verify --self                              Tokenline itself, on free ports, in a folder of its own
  tokenline verify --base-url http://127.0.0.1:8080/api --key-env TOKENLINE_API_KEY \\
      --metrics-url http://127.0.0.1:9464/metrics --ops-url http://127.0.0.1:9464
  tokenline verify --base-url http://127.0.0.1:4000/v1 --key-env LITELLM_KEY --metrics-url http://127.0.0.1:4000/metrics
  tokenline verify --self --json | jq '.findings[] | select(.result == "fail")'

{EXIT_CODES}
"""


def verify(
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="As an OpenAI client is given it.")
    ] = None,
    own: Annotated[bool, typer.Option("--self", help="Start a Tokenline gateway and verify it.")] = False,
    key_env: Annotated[
        str | None, typer.Option("--key-env", metavar="NAME", help="Environment variable that holds the gateway's key.")
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="M", help="Model that leads to the upstream.")] = MODEL,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            "--metrics-url", metavar="URL", help="The gateway's Prometheus page (names of Tokenline, LiteLLM, vLLM)."
        ),
    ] = None,
    ops_url: OpsUrl = None,
    upstream_host: Annotated[
        str, typer.Option("--upstream-host", metavar="ADDR", help="Where the scripted upstream listens.")
    ] = "127.0.0.1",
    upstream_port: Annotated[
        int, typer.Option("--upstream-port", min=0, max=65535, metavar="PORT", help="Its port; 0: any free one.")
    ] = 0,
    wait: Annotated[
        str, typer.Option("--wait", metavar="TIME", help="How long to wait until the gateway leads there.")
    ] = "5m",
    surfaces: Annotated[
        str, typer.Option("--surfaces", metavar="LIST", help="Which APIs.")
    ] = "chat,completions,responses,messages",
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Finds out whether a gateway forwards at once, tells the truth in its figures, and lets go of upstreams.

    Exit code 0 when all passes, 1 when something does not.
    """
    from cli.durations import seconds_of
    from cli.output import print_json
    from cli.verify_run import verify_given, verify_own
    from cli.verify_show import as_builtins, show_report
    from loadtest.conformance.client import PATHS

    if own == (base_url is not None):
        raise CliError("name either --base-url URL or --self", Exit.USAGE)
    known = set(PATHS)
    chosen = tuple(name.strip() for name in surfaces.split(",") if name.strip())
    if unknown := set(chosen) - known or (set() if chosen else {"nothing"}):
        raise CliError(
            f"--surfaces {surfaces!r}: {', '.join(sorted(unknown))}? It takes {', '.join(PATHS)}", Exit.USAGE
        )
    if own:
        report = verify_own(chosen)
    else:
        assert base_url is not None
        report = verify_given(
            base_url,
            key_env=key_env,
            model=model,
            metrics_url=metrics_url,
            ops_url=ops_url,
            config=config,
            upstream=(upstream_host, upstream_port),
            wait_seconds=seconds_of("--wait", wait),
            surfaces=chosen,
        )
    if as_json:
        print_json(as_builtins(report))
    else:
        show_report(report)
    if report.failed:
        raise typer.Exit(int(Exit.FAILURE))
