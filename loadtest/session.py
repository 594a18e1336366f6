"""What a load test and a sampling begin with: the endpoint, its model, its prompts, its metrics page."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.archive import FORMAT, machine, new_run_id, versions
from loadtest.calibration import Lexicon, approximate, calibrate
from loadtest.endpoint import Endpoint, NotAnswered, fingerprint, open_session
from loadtest.monitor import ReadGpus
from loadtest.page import MetricsPage, find_page
from loadtest.record import ERRORS, ODDITIES, Record
from loadtest.server_side import AskServer, join_server
from loadtest.settings import BenchSettings
from loadtest.tokenizer import EndpointTokenizer, LocalTokenizer, Tokenizer, count_answers
from loadtest.workload import FilePrompts, MadePrompts, Size, read_prompts
from tracing.clock import Clock


@dataclass(frozen=True)
class Asked:
    """A load test or a sampling, as it was asked for."""

    settings: BenchSettings
    key: str | None = None
    sizes: Sequence[Size] = ()
    """The mix of made prompts; empty: all of workload.prompt_tokens."""
    metrics_url: str | None = None
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    ask_server: AskServer | None = None
    """Asks the gateway's ops listener, where the endpoint turns out to be one of ours."""
    read_gpus: ReadGpus | None = None
    """Where the endpoint is on this machine and it has GPUs."""
    ops_url: str | None = None
    """The gateway's ops listener, if the endpoint is one of ours; None: where it is by default."""


@dataclass
class Session:
    """All that is known before the first request."""

    asked: Asked
    endpoint: Endpoint
    model: str
    prompts: MadePrompts | FilePrompts
    lengths: str
    page: MetricsPage | None
    notes: list[str]
    tokenizer: Tokenizer


@asynccontextmanager
async def open_bench(asked: Asked, rng: random.Random) -> AsyncIterator[Session]:
    """Asks the endpoint what must be known. Raises NotAnswered or SettingsError where a run makes no sense."""
    settings = asked.settings
    async with open_session() as http:
        endpoint = Endpoint(settings.api, asked.key, http)
        notes: list[str] = []
        model = await endpoint.model(settings.api.model)
        tokenizer = tokenizer_of(settings.workload.tokenizer, endpoint, model)
        if settings.workload.prompts:
            prompts: MadePrompts | FilePrompts = read_prompts(Path(settings.workload.prompts))
            lengths = f"as they are in {settings.workload.prompts}"
        else:
            lexicon = await _lexicon(tokenizer)
            sizes = asked.sizes or (Size("", settings.workload.prompt_tokens),)
            prompts = MadePrompts(lexicon, sizes, settings.workload.shared_prefix_tokens, rng)
            lengths = lexicon.how
            if not lexicon.is_exact:
                notes.append(f"prompt lengths are {lexicon.how}")
        page = None
        if settings.metrics.collect_gpu_util:
            page = await find_page(settings.api.base_url, asked.metrics_url, http, asked.ops_url)
            if page is None and asked.read_gpus is None:
                where = asked.metrics_url or "the endpoint's /metrics and at the ops listener"
                notes.append(
                    f"no engine's figures at {where}: utilisation is not sampled (--metrics-url names the page)"
                )
        yield Session(asked, endpoint, model, prompts, lengths, page, notes, tokenizer)


def tokenizer_of(source: str | None, endpoint: Endpoint, model: str) -> Tokenizer:
    """The one that was named, else the server's own. Raises SettingsError."""
    return LocalTokenizer(source) if source else EndpointTokenizer(endpoint, model)


async def _lexicon(tokenizer: Tokenizer) -> Lexicon:
    try:
        return await calibrate(tokenizer.of_chat, tokenizer.name)
    except NotAnswered as error:
        return approximate(str(error))


def heading(session: Session, kind: str, clock: Clock) -> dict[str, Any]:
    """What a run's file begins with: who, what, with which settings, where."""
    settings = session.asked.settings
    wall_ns = clock.wall_ns()
    return {
        "format": FORMAT,
        "kind": kind,
        "run": new_run_id(wall_ns),
        "started_unix_ms": wall_ns // 1_000_000,
        "base_url": settings.api.base_url,
        "key_fingerprint": fingerprint(session.asked.key),
        "model": session.model,
        "prompt_lengths": session.lengths,
        "settings": settings.model_dump(),
        "mix": [{"name": s.name, "tokens": s.tokens, "weight": s.weight} for s in session.asked.sizes],
        "metrics_url": session.page.url if session.page else None,
        "versions": versions(),
        "machine": machine(),
    }


async def complete_records(session: Session, records: Sequence[Record]) -> list[str]:
    """What only others know of requests that have ended: tokens that usage did not tell, the gateway's stages."""
    await count_answers(records, session.tokenizer)
    return await join_server(records, session.asked.ask_server)


def token_counts(records: Sequence[Record]) -> str:
    """Where the output token counts come from, in words."""
    good = [record for record in records if record.is_good]
    if not good:
        return "none"
    sources = Counter("usage" if r.usage_tokens is not None else r.counted_by or "events" for r in good)
    (first, _), *others = sources.most_common()
    return first + "".join(f", but {name} in {count} of {len(good)} requests" for name, count in others)


def length_notes(session: Session, records: Sequence[Record]) -> list[str]:
    """Where prompts that should have an exact length had another by the answers' usage."""
    if not session.lengths.startswith("exact"):
        return []
    told = [r.prompt_tokens - r.asked_prompt_tokens for r in records if r.prompt_tokens is not None]
    wrong = sum(difference != 0 for difference in told)
    if not wrong:
        return []
    return [f"{wrong} of {len(told)} prompts had another length by usage, up to {max(map(abs, told))} tokens off"]


def explained(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every kind of failure and oddity that came up: how often, what it means, one example."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.fault is not None:
            _add(found, record.fault.kind, "error", ERRORS[record.fault.kind], record.fault.detail)
        for kind in record.retried_for:
            _add(found, f"retried: {kind}", "retry", ERRORS[kind], "")
        if record.is_good:
            for kind in record.oddities:
                _add(found, kind, "oddity", ODDITIES[kind], "")
    return sorted(found.values(), key=lambda entry: (entry["what"], -entry["count"]))


def _add(found: dict[str, dict[str, Any]], kind: str, what: str, meaning: str, example: str) -> None:
    entry = found.setdefault(kind, {"kind": kind, "what": what, "count": 0, "meaning": meaning, "example": example})
    entry["count"] += 1
