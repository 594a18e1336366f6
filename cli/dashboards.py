"""`tokenline dashboards`: rules and dashboards from the settings, and a check of both against a real Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.errors import EXIT_CODES, CliError, Exit
from cli.options import Config, Json

app = typer.Typer(no_args_is_help=True, help="Prometheus rules and Grafana dashboards (build, check, metrics).")


@app.command(
    short_help="Writes rules, configuration and dashboards.",
    epilog=f"""
Examples:

\b
  tokenline dashboards build                                   into ./dashboards, for this machine
  tokenline dashboards build --out /etc/tokenline --target gateway:9464 --alertmanager alerts:9093
  tokenline dashboards build --grafana-url https://grafana.example.com --console-url https://ops.example.com/console

Thresholds of alerts are those of [slo]: build again when they change, and reload Prometheus.

{EXIT_CODES}
""",
)
def build(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where prometheus/ and grafana/ go.")] = Path(
        "dashboards"
    ),
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target", metavar="HOST:PORT", help="An ops listener; may be repeated. [default: as configured]"
        ),
    ] = None,
    alertmanagers: Annotated[
        list[str] | None, typer.Option("--alertmanager", metavar="HOST:PORT", help="May be repeated.")
    ] = None,
    console_url: Annotated[
        str | None, typer.Option("--console-url", metavar="URL", help="The console as people reach it.")
    ] = None,
    grafana_url: Annotated[
        str | None, typer.Option("--grafana-url", metavar="URL", help="Grafana as people reach it.")
    ] = None,
    runbooks_url: Annotated[
        str | None, typer.Option("--runbooks-url", metavar="URL", help="Where docs/runbooks is served.")
    ] = None,
    prometheus_url: Annotated[
        str | None, typer.Option("--prometheus-url", metavar="URL", help="Prometheus as Grafana reaches it.")
    ] = None,
    tempo_url: Annotated[
        str | None, typer.Option("--tempo-url", metavar="URL", help="A Tempo that exemplars lead to as well.")
    ] = None,
    window_scale: Annotated[
        float, typer.Option("--window-scale", metavar="X", help="Shortens every window and hold of rules; for trials.")
    ] = 1.0,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Writes Prometheus's configuration and rules and Grafana's dashboards and provisioning."""
    import msgspec

    from cli.ops import load_for_asking
    from cli.output import print_json
    from dashboards.files import write_files
    from dashboards.grafana.files import PROMETHEUS_URL, grafana_files
    from dashboards.prometheus.files import prometheus_files
    from dashboards.prometheus.promql import Windows
    from dashboards.sources import default_places

    if not 0 < window_scale <= 1:
        raise CliError(f"--window-scale {window_scale:g}: it takes a number above 0 and at most 1", Exit.USAGE)
    settings = load_for_asking(config).settings
    given = {
        "targets": tuple(targets or ()),
        "alertmanagers": tuple(alertmanagers or ()),
        "console": console_url,
        "grafana": grafana_url,
        "runbooks": runbooks_url,
        "tempo": tempo_url,
    }
    chosen = {key: value.rstrip("/") if isinstance(value, str) else value for key, value in given.items() if value}
    places = msgspec.structs.replace(default_places(settings), **chosen)
    files = prometheus_files(settings, places, Windows(window_scale))
    files |= grafana_files(places, prometheus_url=prometheus_url or PROMETHEUS_URL)
    try:
        write_files(out, files)
    except OSError as error:
        raise CliError(f"--out {out}: {error.strerror}", Exit.USAGE) from error
    if as_json:
        print_json({"files": [str(out / name) for name in files]})
    else:
        for name in files:
            typer.echo(out / name)


@app.command(
    short_help="Holds dashboards and rules against a Prometheus.",
    epilog=f"""
Examples:

\b
  tokenline dashboards check
  tokenline dashboards check --json | jq '.empty, .errors, .lint'
  tokenline dashboards check --pictures docs/img

It starts a gateway with the simulated engine and a Prometheus, both on free ports and in a folder of their own, asks
for a while, and puts every query of every panel and rule to Prometheus. It needs `prometheus` on the PATH.

{EXIT_CODES}
""",
)
def check(
    seconds: Annotated[
        float, typer.Option("--seconds", min=10, max=50, metavar="N", help="How long the load lasts, at least.")
    ] = 40,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="DIR", help="Draws the dashboards from the answers, as SVG.")
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Holds dashboards and rules against a real Prometheus. Exit code 0 when nothing is wrong, 1 when something is."""
    from cli.dashboards_check import run_check, show_report
    from cli.ops import load_for_asking
    from cli.output import print_json

    report = run_check(load_for_asking(config).settings, seconds=seconds, pictures=pictures)
    if as_json:
        print_json(report)
    else:
        show_report(report)
    if report["empty"] or report["errors"] or report["lint"]:
        raise typer.Exit(int(Exit.FAILURE))


@app.command(
    short_help="Prints the metrics catalogue.",
    epilog=f"""
Example:

\b
  tokenline dashboards metrics > docs/metrics.md

{EXIT_CODES}
""",
)
def metrics(as_json: Json = False) -> None:
    """Prints the metrics catalogue: every metric with its type, labels and meaning."""
    from cli.metrics_page import metrics_page
    from cli.output import print_json
    from tracing.metrics import CATALOGUE

    if as_json:
        rows = [{"name": m.name, "type": m.kind, "labels": m.labels, "help": m.help} for m in CATALOGUE]
        print_json(rows)
    else:
        typer.echo(metrics_page(), nl=False)
