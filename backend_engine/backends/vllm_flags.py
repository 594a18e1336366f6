"""Our settings as arguments and environment of `vllm serve`, and what of them vLLM has no name for.

Flags are those documented for vLLM 0.12, 0.18 and 0.30 (https://docs.vllm.ai/en/v0.30.0/cli/serve/).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from protocol.timings import HostIdentity
from settings.errors import SettingsError
from settings.schema import DEMO_HUB_ID, DEMO_MODEL, EngineSettings, Settings
from tracing import semconv

OWNED = frozenset(
    {
        "--model", "--served-model-name", "--uds", "--host", "--port", "--api-key", "--otlp-traces-endpoint",
        "--disable-log-stats",
    }
)  # fmt: skip
"""Not for `engine.vllm_args`: the gateway finds the engine, its model and its spans by them. (vLLM makes no spans
without its statistics.)"""

UNHEARD: Mapping[str, str] = {
    "engine.device": "the installed build of vLLM decides what it runs on",
    "engine.cpu_kv_cache_gib": 'only vLLM\'s CPU build has it: set engine.device = "cpu" as well',
    "engine.cuda_graphs": "vLLM records its own; --enforce-eager in engine.vllm_args keeps it from that",
    "model.kv_cache_ratio": "vLLM sizes its cache by engine.gpu_memory_utilization alone",
    "model.batch_wait_ms": "vLLM never waits for company",
    "scheduler.policy": "vLLM always batches continuously",
    "scheduler.queue_warn_ms": "vLLM does not warn of waits; tokenline_stage_duration_seconds shows them",
    "token_interval.overlap_token_interval": "it is part of vLLM's --async-scheduling",
    "token_interval.detokenizer_async": "vLLM always makes text outside its engine's process",
    "token_interval.slot_reuse": "vLLM has no such switch",
    "logging.log_tps": "vLLM logs its own throughput every 10 s",
    "logging.log_gpu_util": "vLLM does not log utilisation",
    "simulated.forward_ms": "vLLM has no simulated device",
    "simulated.prefill_token_us": "vLLM has no simulated device",
    "simulated.decode_token_us": "vLLM has no simulated device",
    "simulated.seed": "vLLM has no simulated device",
}
"""Settings without a flag, and what is so instead. Named when they were given, never dropped in silence."""

BSP_DELAY_MS = 500
"""vLLM's exporter would keep spans for 5 s; the join waits for them."""
_CHUNKLESS = "scheduler.enable_chunked_prefill = false"


class VllmPlan(msgspec.Struct, frozen=True):
    """How vLLM is started, but for where its command is."""

    arguments: tuple[str, ...]
    """After `vllm serve`. They hold no secret."""
    environment: dict[str, str]
    """Set beside what is inherited."""
    secret: frozenset[str]
    """Names in `environment` that must not be shown."""


def check_vllm(settings: Settings) -> None:
    """Raises SettingsError where vLLM could only fail on what the settings ask for."""
    engine, scheduler = settings.engine, settings.scheduler
    if engine.device == "simulated":
        raise SettingsError(
            'engine.device = "simulated" is a device of Tokenline\'s own engine, and engine.backend is "vllm"; '
            "leave one of them out"
        )
    if engine.dtype == "float64":
        raise SettingsError('engine.dtype = "float64": vLLM takes auto, float32, bfloat16 or float16')
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise SettingsError(
            f"scheduler.max_num_batched_tokens = {scheduler.max_num_batched_tokens} is below scheduler.max_num_seqs = "
            f"{scheduler.max_num_seqs}: vLLM wants room for one token of every sequence in a step"
        )
    length = engine.max_model_len
    if not scheduler.enable_chunked_prefill and length is not None and scheduler.max_num_batched_tokens < length:
        raise SettingsError(
            f"{_CHUNKLESS} needs scheduler.max_num_batched_tokens (now {scheduler.max_num_batched_tokens}) to be at "
            f"least engine.max_model_len = {length}: raise it, or let prompts be prefilled in chunks"
        )
    for argument in engine.vllm_args:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in OWNED:
            raise SettingsError(f"engine.vllm_args: {flag} is Tokenline's to set; leave it out")


def plan_of(
    settings: Settings, socket: Path | None, *, host: HostIdentity, inherited: Mapping[str, str], is_alone: bool
) -> VllmPlan:
    """Arguments and environment. `socket`: where it listens; None: on engine.vllm_port, or, `is_alone`, on
    server.host and server.port with server.api_key. Raises SettingsError."""
    check_vllm(settings)
    environment, secret = _environment(settings, host, inherited)
    key = settings.server.api_key if is_alone else None
    if key is not None:
        environment["VLLM_API_KEY"] = key.get_secret_value()
        secret.add("VLLM_API_KEY")
    arguments = (*_model(settings), *_listener(settings, socket, is_alone), *_scheduling(settings))
    return VllmPlan((*arguments, *_telling(settings), *settings.engine.vllm_args), environment, frozenset(secret))


def notes_on(settings: Settings, origins: Mapping[str, str]) -> list[str]:
    """What the user gave and vLLM has no flag for; `origins` as the loader tells them."""
    engine = settings.engine
    heard = {"auto": {"engine.device"}, "cpu": {"engine.cpu_kv_cache_gib"}}.get(engine.device, set())
    notes = [
        f'{key} ({origins[key]}) has no effect with engine.backend = "vllm": {why}'
        for key, why in UNHEARD.items()
        if origins.get(key, "default") != "default" and key not in heard
    ]
    if engine.model.endswith(".gguf"):
        notes.append(
            "vLLM reads a .gguf file only with the tokenizer named beside it, and newer versions need a plugin for it: "
            'engine.vllm_args = ["--tokenizer", "HUB_ID"]'
        )
    return notes


def _model(settings: Settings) -> list[str]:
    engine = settings.engine
    found = [
        _model_name(engine), "--served-model-name", settings.engine_model_name, "--dtype", engine.dtype,
        "--tensor-parallel-size", str(engine.tensor_parallel_size),
        "--pipeline-parallel-size", str(engine.pipeline_parallel_size),
        "--gpu-memory-utilization", f"{engine.gpu_memory_utilization:g}",
    ]  # fmt: skip
    if engine.max_model_len is not None:
        found += ["--max-model-len", str(engine.max_model_len)]
    if engine.page_size != EngineSettings().page_size:  # else the attention backend chooses, which it does better
        found += ["--block-size", str(engine.page_size)]
    if settings.model.max_tokens is not None:  # vLLM takes it as default and as ceiling, as we do
        limit = {"max_new_tokens": settings.model.max_tokens}
        found += ["--override-generation-config", json.dumps(limit)]
    return found


def _model_name(engine: EngineSettings) -> str:
    if engine.model == DEMO_MODEL:
        return DEMO_HUB_ID
    return str(Path(engine.model).expanduser()) if engine.model.startswith("~") else engine.model


def _listener(settings: Settings, socket: Path | None, is_alone: bool) -> list[str]:
    if socket is not None:
        return ["--uds", str(socket)]
    if is_alone:
        return ["--host", settings.server.host, "--port", str(settings.server.port)]
    return ["--host", "127.0.0.1", "--port", str(settings.engine.vllm_port)]


def _scheduling(settings: Settings) -> list[str]:
    scheduler = settings.scheduler
    return [
        "--max-num-seqs", str(scheduler.max_num_seqs),
        "--max-num-batched-tokens", str(scheduler.max_num_batched_tokens),
        "--enable-chunked-prefill" if scheduler.enable_chunked_prefill else "--no-enable-chunked-prefill",
        "--scheduling-policy", scheduler.scheduler_policy,
        "--async-scheduling" if settings.token_interval.async_scheduling else "--no-async-scheduling",
    ]  # fmt: skip


def _telling(settings: Settings) -> list[str]:
    """Spans to the observer, cached tokens in the usage, and no log line of its own for each request and probe. The
    gateway's request id is vLLM's already, by the x-request-id header, so its costly answer header stays off."""
    return [
        "--otlp-traces-endpoint", settings.otlp_endpoint, "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log", "--uvicorn-log-level", settings.logging.level,
    ]  # fmt: skip


def _environment(
    settings: Settings, host: HostIdentity, inherited: Mapping[str, str]
) -> tuple[dict[str, str], set[str]]:
    resource = f"host.id={quote(host.host_id)},{semconv.BOOT_ID}={quote(host.boot_id)}"
    theirs = inherited.get("OTEL_RESOURCE_ATTRIBUTES")
    found = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_RESOURCE_ATTRIBUTES": f"{theirs},{resource}" if theirs else resource,
        "NO_PROXY": _without_proxy(inherited),
        "no_proxy": _without_proxy(inherited),
    }
    defaults = {
        "OTEL_SERVICE_NAME": "vllm",
        "OTEL_BSP_SCHEDULE_DELAY": str(BSP_DELAY_MS),
        "VLLM_LOGGING_LEVEL": settings.logging.level.upper(),
    }
    found |= {name: value for name, value in defaults.items() if name not in inherited}
    if settings.engine.device == "cpu":
        found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(settings.engine.cpu_kv_cache_gib)))
    secret = set()
    if settings.server.otlp_token is not None:
        token = settings.server.otlp_token.get_secret_value()
        found["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] = f"authorization=Bearer%20{quote(token, safe='')}"
        secret.add("OTEL_EXPORTER_OTLP_TRACES_HEADERS")
    return found, secret


def _without_proxy(inherited: Mapping[str, str]) -> str:
    """The exporter must reach this machine's receiver directly; the hub may still need the proxy."""
    theirs = inherited.get("no_proxy") or inherited.get("NO_PROXY")
    return ",".join([*([theirs] if theirs else []), "127.0.0.1", "localhost", "::1"])


def inherited_by_vllm(environ: Mapping[str, str]) -> dict[str, str]:
    """What vLLM sees of our environment: no settings of ours (secrets among them), nobody else's OTLP credentials, and
    no key that the gateway does not know of."""
    dropped = {"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "VLLM_API_KEY"}
    return {name: value for name, value in environ.items() if name not in dropped and not name.startswith("TOKENLINE_")}
