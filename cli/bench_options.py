"""Options that `bench run` and `bench sample` share, and what they come to."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from cli.errors import CliError, Exit

if TYPE_CHECKING:
    from cli.ops import OpsClient
    from loadtest.monitor import ReadGpus
    from loadtest.server_side import AskServer
    from loadtest.session import Asked
    from loadtest.settings import BenchSettings
    from loadtest.workload import Size

SHORT_TOKENS = 64
LONG_TOKENS = 1024
_T = TypeVar("_T")

SettingsFile = Annotated[
    Path | None, typer.Option("--settings", metavar="FILE", help="A settings.json; flags beside it win.")
]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        "--base-url", metavar="URL", help="As an OpenAI client is given it. [default: http://127.0.0.1:8080/api]"
    ),
]
KeyEnv = Annotated[
    str | None,
    typer.Option("--key-env", metavar="NAME", help="Environment variable with the key. [default: TOKENLINE_API_KEY]"),
]
NoKey = Annotated[bool, typer.Option("--no-key", help="The endpoint takes no key.")]
BenchModel = Annotated[
    str | None, typer.Option("--model", metavar="M", help="Model. [default: the only one that the endpoint lists]")
]
PromptTokens = Annotated[
    int | None, typer.Option("--prompt-tokens", min=1, help="Length of a prompt, the chat template included.")
]
MaxOutputTokens = Annotated[int | None, typer.Option("--max-output-tokens", min=1, help="Most tokens of an answer.")]
Prompts = Annotated[
    str | None, typer.Option("--prompts", metavar="FILE", help="Your own prompts: JSONL, or ShareGPT-shaped JSON.")
]
Mix = Annotated[
    str | None,
    typer.Option("--mix", metavar="LIST", help="Short and long prompts, such as short,long or short:0.8,long:0.2."),
]
ShortTokens = Annotated[int, typer.Option("--short-tokens", min=1, help="Length of a short prompt of the mix.")]
LongTokens = Annotated[int, typer.Option("--long-tokens", min=1, help="Length of a long prompt of the mix.")]
MetricsUrl = Annotated[
    str | None,
    typer.Option(
        "--metrics-url", metavar="URL", help="The engine's metrics page. [default: looked for at the endpoint]"
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="NAME",
        help="Hugging Face name or folder of the model's tokenizer. [default: the endpoint's /tokenize]",
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Ask for answers of full length (our engine, vLLM, SGLang).")
]


def settings_of(file: Path | None, flags: dict[str, Any], *, no_key: bool) -> BenchSettings:
    """The settings file, if any, with the flags over it."""
    from loadtest.settings import BenchSettings, read_bench_settings, with_flags

    settings = with_flags(read_bench_settings(file) if file else BenchSettings(), flags)
    if no_key:
        api = settings.api.model_copy(update={"api_key_env": None})
        settings = settings.model_copy(update={"api": api})
    return settings


def asked_of(
    settings: BenchSettings,
    mix: str | None,
    lengths: tuple[int, int],
    metrics_url: str | None,
    slo: str | None = None,
    ops_url: str | None = None,
) -> Asked:
    """What the endpoint will be asked, with the key out of the environment."""
    from cli.ops import configured_ops_url
    from loadtest.endpoint import key_of
    from loadtest.session import Asked

    key = key_of(settings.api, os.environ)
    page_at = ops_url or configured_ops_url()
    read_gpus = gpus_of(settings.api.base_url) if settings.metrics.collect_gpu_util else None
    return Asked(
        settings, key, sizes_of(mix, lengths), metrics_url, slo_of(slo), ask_server_of(ops_url), read_gpus, page_at
    )


def gpus_of(base_url: str) -> ReadGpus | None:
    """Reads this machine's GPUs by NVML, where the endpoint is on this machine and there are any."""
    from urllib.parse import urlsplit

    from settings.checks import is_loopback

    if not is_loopback(urlsplit(base_url).hostname):
        return None
    from backend_engine.nvml import open_nvml

    nvml = open_nvml()
    if nvml is None:
        return None

    def read() -> dict[str, float]:
        from loadtest.page import gpu_figures

        return gpu_figures([msgspec.structs.asdict(one) for one in nvml.read().values()])

    return read


def ask_server_of(ops_url: str | None) -> AskServer:
    """Asks the ops listener of the gateway, which is looked for only once a gateway has answered."""
    client: OpsClient | None = None

    def ask(ids: Sequence[str]) -> dict[str, Any]:
        from cli.ops import ops_client
        from loadtest.server_side import NotJoined
        from settings.errors import SettingsError

        nonlocal client
        try:
            client = client or ops_client(ops_url, None)
            found = client.request("POST", "/requests", json={"ids": list(ids)})["requests"]
        except (CliError, SettingsError) as error:
            raise NotJoined(str(error)) from None
        return found if isinstance(found, dict) else {}

    return ask


def sizes_of(mix: str | None, lengths: tuple[int, int]) -> tuple[Size, ...]:
    """The sizes of --mix; empty without it."""
    from loadtest.workload import parse_mix

    return parse_mix(mix, {"short": lengths[0], "long": lengths[1]}) if mix else ()


def slo_of(text: str | None) -> dict[str, float]:
    """Objectives of `ttft=500,tpot=50`, in ms."""
    objectives: dict[str, float] = {}
    for part in (text or "").split(","):
        name, _, value = part.strip().partition("=")
        try:
            if part.strip():
                if name not in ("ttft", "tpot", "e2e") or float(value) <= 0:
                    raise ValueError
                objectives[name] = float(value)
        except ValueError:
            raise CliError(
                f"--slo {text!r}: write milliseconds of ttft, tpot, e2e: ttft=500,tpot=50", Exit.USAGE
            ) from None
    return objectives


def runs_folder() -> Path:
    """Where runs are kept."""
    from settings.paths import state_dir_of

    return state_dir_of(os.environ) / "runs"


def complete(work: Callable[[Callable[[], bool]], Coroutine[Any, Any, _T]]) -> _T:
    """Runs to the end; Ctrl-C ends it in order. `work` gets a function that says whether it came."""
    import asyncio
    import sys

    from cli.signals import ending_signals
    from loadtest.endpoint import NotAnswered

    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with ending_signals() as ending, asyncio.Runner(loop_factory=factory) as runner:
        try:
            return runner.run(work(lambda: ending.to_end))
        except NotAnswered as error:
            hint = "; is the key right?" if error.is_refusal else ""
            raise CliError(f"{error}{hint}", Exit.FAILURE if error.is_refusal else Exit.UNREACHABLE) from None


def check_archive() -> None:
    """Before anything is measured: whether the run can be kept. Raises CliError."""
    folder = runs_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise CliError(f"{folder} can't be made: {error.strerror}; TOKENLINE_STATE_DIR names another folder") from None
    if not writable:
        raise CliError(f"{folder} can't be written to; TOKENLINE_STATE_DIR names another folder")


def save(run: dict[str, Any]) -> Path:
    """Puts the run into the archive."""
    from loadtest.archive import save_run

    try:
        return save_run(runs_folder(), run)
    except OSError as error:
        raise CliError(
            f"the run can't be saved in {runs_folder()}: {error.strerror}; TOKENLINE_STATE_DIR names another folder"
        ) from None


def read_kept(name: str) -> dict[str, Any]:
    """A kept run, by any of its names."""
    from loadtest.archive import NoRun, find_run, read_run

    try:
        return read_run(find_run(runs_folder(), name))
    except NoRun as error:
        raise CliError(str(error), Exit.NOT_FOUND) from None
