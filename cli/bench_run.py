"""`tokenline bench run`: a load test in stages."""

from __future__ import annotations

from typing import Annotated, Any

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
    PromptTokens,
    SettingsFile,
    ShortTokens,
    Tokenizer,
)
from cli.errors import EXIT_CODES, Exit
from cli.options import Json, OpsUrl

EPILOG = f"""
A stage counts its last two thirds: the tokens that arrived then, the requests that were due then. Nothing drains
between stages. With --duration or a settings.json, all of the duration counts and the warm-up comes before it.
Each run is kept in the state folder, under runs/, also when Ctrl-C ends it.

Examples:

\b
  tokenline bench run --settings settings.json
  tokenline bench run --stages 32:30s,128:3m,256:3m --prompt-tokens 512 --max-output-tokens 256
  tokenline bench run --rate 10 --arrival poisson --duration 60s --slo ttft=500,tpot=50
  tokenline bench run --base-url http://127.0.0.1:8000/v1 --no-key --concurrency 8 --duration 30s --json | jq .stages

{EXIT_CODES}
"""


def run(
    settings: SettingsFile = None,
    base_url: BaseUrl = None,
    key_env: KeyEnv = None,
    no_key: NoKey = False,
    model: BenchModel = None,
    stages: Annotated[
        str | None,
        typer.Option("--stages", metavar="LIST", help="IN_FLIGHT:TIME or RATErps:TIME, such as 32:30s,128:3m."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, help="Requests in flight; with a rate, the most. [default: 32]"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0, help="Requests per second, on schedule; 0: as fast as they end.")
    ] = None,
    arrival: Annotated[
        str | None, typer.Option("--arrival", metavar="KIND", help="constant, poisson or gamma. [default: poisson]")
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option("--burstiness", help="Shape of gamma arrivals; below 1: burstier than Poisson.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--duration", metavar="TIME", help="The part that counts. [default: 60s]")
    ] = None,
    warmup: Annotated[
        str | None, typer.Option("--warmup", metavar="TIME", help="Load before it. [default: none]")
    ] = None,
    prompt_tokens: PromptTokens = None,
    max_output_tokens: MaxOutputTokens = None,
    ignore_eos: IgnoreEos = False,
    mix: Mix = None,
    short_tokens: ShortTokens = SHORT_TOKENS,
    long_tokens: LongTokens = LONG_TOKENS,
    shared_prefix_tokens: Annotated[
        int | None,
        typer.Option("--shared-prefix-tokens", min=0, help="So much of each prompt is the same. [default: 0]"),
    ] = None,
    prompts: Prompts = None,
    slo: Annotated[
        str | None, typer.Option("--slo", metavar="LIST", help="Objectives in ms for goodput: ttft=500,tpot=50.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="One request with its retries. [default: 2m]")
    ] = None,
    tokenizer: Tokenizer = None,
    metrics_url: MetricsUrl = None,
    ops_url: OpsUrl = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of random arrivals. [default: 0]")] = None,
    as_json: Json = False,
) -> None:
    """Puts an OpenAI-compatible endpoint under load: TPS, TTFT, TPOT, gaps and E2E by stage, errors by kind.

    Exit code 1 when it was stopped before its end or no request succeeded; the run is kept all the same.
    """
    from cli.bench_options import asked_of, check_archive, complete, save, settings_of
    from cli.bench_progress import live
    from cli.bench_show import as_answer, show_run
    from cli.durations import seconds_of
    from cli.output import print_json
    from loadtest.run import run_load
    from loadtest.stages import parse_stages, stage_of
    from tracing.clock import SystemClock

    flags: dict[str, Any] = {
        "api.base_url": base_url,
        "api.api_key_env": key_env,
        "api.model": model,
        "api.timeout_seconds": seconds_of("--timeout", timeout) if timeout else None,
        "load_test.concurrency": concurrency,
        "load_test.request_rate": rate,
        "load_test.arrival": arrival,
        "load_test.burstiness": burstiness,
        "load_test.duration_seconds": seconds_of("--duration", duration) if duration else None,
        "load_test.warmup_seconds": seconds_of("--warmup", warmup) if warmup else None,
        "load_test.seed": seed,
        "workload.prompt_tokens": prompt_tokens,
        "workload.max_output_tokens": max_output_tokens,
        "workload.ignore_eos": ignore_eos or None,
        "workload.shared_prefix_tokens": shared_prefix_tokens,
        "workload.prompts": prompts,
        "workload.tokenizer": tokenizer,
    }
    chosen = settings_of(settings, flags, no_key=no_key)
    load = chosen.load_test
    plan = parse_stages(stages, load.concurrency) if stages else (stage_of(load),)
    asked = asked_of(chosen, mix, (short_tokens, long_tokens), metrics_url, slo, ops_url)
    check_archive()
    with live(plan) as tell:
        outcome = complete(lambda is_stopped: run_load(asked, plan, SystemClock(), is_stopped=is_stopped, tell=tell))
    file = save(outcome)
    if as_json:
        print_json(as_answer(outcome, file))
    else:
        show_run(outcome, file)
    if outcome["stopped"] or not any(stage["e2e_ms"]["count"] for stage in outcome["stages"]):
        raise typer.Exit(int(Exit.FAILURE))
