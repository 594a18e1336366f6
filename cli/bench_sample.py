"""`tokenline bench sample`: requests one after another, each of them shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.bench_options import (
    LONG_TOKENS,
    SHORT_TOKENS,
    BaseUrl,
    BenchModel,
    IgnoreEos,
    KeyEnv,
    LongTokens,
    MaxOutputTokens,
    MetricsUrl,
    Mix,
    NoKey,
    Prompts,
    SettingsFile,
    ShortTokens,
    Tokenizer,
)
from cli.errors import EXIT_CODES, CliError, Exit
from cli.options import Json, OpsUrl

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.record import Record

EPILOG = f"""
One request at a time: what a server takes when nobody else asks. Short prompts, long ones, and both mixed, N of each;
or your own from a file. Health is told by percentiles: P99 TTFT up to 3 times P50 passes, up to 5 is to be watched,
more fails; a P99 TPOT of 10 times P50 fails. Means are for reference only. Each sampling is kept under runs/.

Examples:

\b
  tokenline bench sample -n 50
  tokenline bench sample -n 30 --mix short --max-output-tokens 32
  tokenline bench sample -n 100 --prompts my-prompts.jsonl --model my-model
  tokenline bench sample -n 50 --json | jq '.health[] | select(.result == "fail")'

{EXIT_CODES}
"""


def sample(
    count: Annotated[int, typer.Option("-n", "--count", min=1, max=1_000_000, help="Requests of each group.")] = 20,
    mix: Mix = "short,long",
    short_tokens: ShortTokens = SHORT_TOKENS,
    long_tokens: LongTokens = LONG_TOKENS,
    prompts: Prompts = None,
    settings: SettingsFile = None,
    base_url: BaseUrl = None,
    key_env: KeyEnv = None,
    no_key: NoKey = False,
    model: BenchModel = None,
    max_output_tokens: MaxOutputTokens = None,
    ignore_eos: IgnoreEos = False,
    tokenizer: Tokenizer = None,
    metrics_url: MetricsUrl = None,
    ops_url: OpsUrl = None,
    as_json: Json = False,
) -> None:
    """Asks one request after another: TTFT, TPOT and total of each, percentiles, health.

    Exit code 1 when a health rule fails or it was stopped; the sampling is kept all the same.
    """
    from cli.bench_options import asked_of, check_archive, complete, save, settings_of
    from cli.bench_show import as_answer
    from cli.output import print_json
    from loadtest.sample import run_sample
    from tracing.clock import SystemClock

    flags: dict[str, Any] = {
        "api.base_url": base_url,
        "api.api_key_env": key_env,
        "api.model": model,
        "workload.max_output_tokens": max_output_tokens,
        "workload.ignore_eos": ignore_eos or None,
        "workload.prompts": prompts,
        "workload.tokenizer": tokenizer,
    }
    chosen = settings_of(settings, flags, no_key=no_key)
    if not chosen.workload.stream:
        raise CliError(
            "workload.stream = false: a sampling measures TTFT and TPOT, which only streams have", Exit.USAGE
        )
    sizes = None if chosen.workload.prompts else mix
    asked = asked_of(chosen, sizes, (short_tokens, long_tokens), metrics_url, ops_url=ops_url)
    check_archive()
    show = _nothing if as_json else _line
    outcome = complete(lambda is_stopped: run_sample(asked, count, SystemClock(), is_stopped=is_stopped, show=show))
    file = save(outcome)
    if as_json:
        print_json(as_answer(outcome, file))
    else:
        _show(outcome, file)
    if outcome["stopped"] or any(rule["result"] == "fail" for rule in outcome["health"]):
        raise typer.Exit(int(Exit.FAILURE))


def _nothing(_group: str, _number: int, _record: Record) -> None:
    return


def _line(group: str, number: int, record: Record) -> None:
    from cli.bench_show import ms
    from cli.output import echo

    if number == 1:
        typer.echo(f"{'group':8} {'n':>4} {'prompt':>7} {'output':>7} {'TTFT ms':>9} {'TPOT ms':>9} {'total ms':>9}")
    if record.fault is not None:
        echo(f"{group:8} {number:4} {record.fault.kind}: {record.fault.detail}")
        return
    prompt = "-" if record.prompt_tokens is None else str(record.prompt_tokens)
    times = " ".join(f"{ms(value):>9}" for value in (record.ttft_ms, record.tpot_ms, record.e2e_ms))
    typer.echo(f"{group:8} {number:4} {prompt:>7} {record.output_tokens:7} {times}")


def _show(run: dict[str, Any], file: Path) -> None:
    from rich.text import Text

    from cli.bench_show import beside, show_explained, show_figures, show_server_stages
    from cli.output import console, say, say_notes

    out = console()
    out.print()
    show_figures([(stage["group"], stage) for stage in run["stages"]])
    show_server_stages([(stage["group"], stage) for stage in run["stages"]])
    for stage in run["stages"]:
        for line in beside(stage):
            out.print(f"{stage['group']}: {line}")
    styles = {"pass": "green", "watch": "yellow", "fail": "bold red", "unknown": "dim"}
    for rule in run["health"]:
        out.print(Text(f"{rule['result']:7} {rule['group']}: {rule['rule']} ({rule['seen']})", styles[rule["result"]]))
    show_explained(run)
    say_notes(run["notes"])
    if run["stopped"]:
        say(f"ended before its time: {run['stopped']}")
    say(f"sampling {run['run']} is kept in {file}")
