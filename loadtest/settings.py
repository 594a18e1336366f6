"""Settings of a load test: `settings.json` as users have it, frozen once it is read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from settings.errors import SettingsError

Arrival = Literal["constant", "poisson", "gamma"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Api(_Section):
    """The endpoint: any that speaks OpenAI's chat completions."""

    base_url: str = "http://127.0.0.1:8080/api"
    api_key_env: str | None = "TOKENLINE_API_KEY"
    """Environment variable that holds the key; a key is never written into a file. None: no key is sent."""
    timeout_seconds: float = Field(120, gt=0)
    """One request in all, its retries included."""
    max_retries: int = Field(3, ge=0, le=100)
    model: str | None = None

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be like http://127.0.0.1:8080/api")
        if parts.username or parts.password:
            raise ValueError("must not hold credentials; name the key's variable in api.api_key_env")
        return value.rstrip("/")


class LoadTest(_Section):
    """How much load, and for how long."""

    concurrency: int = Field(32, ge=1, le=100_000)
    """Requests in flight; with a request_rate, the most that may be."""
    duration_seconds: float = Field(60, gt=0)
    """The part that counts."""
    request_rate: float = Field(0, ge=0)
    """Requests per second on an absolute schedule; 0: as fast as `concurrency` allows."""
    warmup_seconds: float = Field(0, ge=0)
    """Load before the part that counts; nothing is drained in between."""
    arrival: Arrival = "poisson"
    burstiness: float = Field(1.0, gt=0)
    """Shape of gamma arrivals: below 1 burstier than Poisson, above 1 more even."""
    seed: int = 0
    """Of the arrivals; prompts are new in every run."""


class Workload(_Section):
    """What is asked."""

    prompt_tokens: int = Field(512, ge=1)
    max_output_tokens: int = Field(256, ge=1)
    stream: bool = True
    temperature: float = Field(0.7, ge=0)
    ignore_eos: bool = False
    """Asks engines that know it (ours, vLLM, SGLang) to answer to the last token allowed."""
    shared_prefix_tokens: int = Field(0, ge=0)
    """So much of each prompt's beginning is the same; 0: no two prompts begin alike."""
    tokenizer: str | None = None
    """Hugging Face name or folder of the model's tokenizer; None: the endpoint's /tokenize, where it has one."""
    prompts: str | None = None
    """A JSONL or ShareGPT-shaped file in place of made prompts."""


class Metrics(_Section):
    """What is collected beside each request's own times."""

    collect_tps: bool = True
    collect_ttft: bool = True
    collect_tpot: bool = True
    collect_gpu_util: bool = True
    sample_interval_ms: int = Field(500, ge=50)


class BenchSettings(_Section):
    """A whole `settings.json`."""

    api: Api = Api()
    load_test: LoadTest = LoadTest()
    workload: Workload = Workload()
    metrics: Metrics = Metrics()


def read_bench_settings(file: Path) -> BenchSettings:
    """A settings.json. Raises SettingsError that names the key, its value and what is allowed."""
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{file}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: can't be read as JSON: {error}") from None
    return bench_settings(given, str(file))


def bench_settings(given: Any, origin: str) -> BenchSettings:
    """Settings of what was given; `origin` is named in errors."""
    if not isinstance(given, dict):
        raise SettingsError(f"{origin}: must be a JSON object with the keys {', '.join(BenchSettings.model_fields)}")
    try:
        return BenchSettings.model_validate(given)
    except ValidationError as error:
        raise SettingsError(f"{origin}: {_explained(error)}") from None


def with_flags(settings: BenchSettings, flags: Mapping[str, Any]) -> BenchSettings:
    """`settings` with what was given on the command line (`section.key` -> value; None: not given)."""
    table: dict[str, dict[str, Any]] = settings.model_dump()
    for name, value in flags.items():
        if value is not None:
            section, key = name.split(".")
            table[section][key] = value
    return bench_settings(table, "the command line")


def _explained(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    dotted = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _known(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"known here: {', '.join(known)}"
        return f"unknown key {dotted}; {hint}"
    what = str(first["msg"]).removeprefix("Value error, ")
    return f"{dotted} = {first['input']!r}: {what[0].lower()}{what[1:]}"


def _known(path: list[str]) -> list[str]:
    model: type[BaseModel] = BenchSettings
    for part in path:
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)
