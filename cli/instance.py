"""One instance: which processes it has, starting them, waiting for them, ending them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cli.announce import Facts, announce, waiting
from cli.bootstrap import admin_key_file, tenant_key, with_admin_key
from cli.errors import CliError
from cli.exclusive import check_ports, owned_state_dir
from cli.extras import check_engine_installed
from cli.output import say, say_notes
from cli.process import ChildProcess, child_command
from cli.readiness import Probe, loopback_url
from cli.reload import Reloader
from cli.signals import Asked, ending_signals
from cli.supervise import Part, Running, Supervisor
from cli.vllm import check_vllm_startable
from settings.checks import (
    check_answerable,
    check_base_url_port,
    check_engine_startable,
    check_startable,
    listeners_of,
)
from settings.loader import Loaded
from settings.paths import prepare_state_dir
from settings.schema import Settings

TICK_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""For a process to end in order, beyond what it is given to drain."""
ENGINE_GRACE_SECONDS = 10.0
"""The engine ends its core first."""


@dataclass(frozen=True)
class Process:
    """A process of the instance: its role for `cli.child`, and how it is known to be ready."""

    name: str
    role: str
    ready: Probe
    grace_seconds: float


Load = Callable[[], Loaded]
"""Reads the configuration: at the start, and for every reload."""


def run_up(load: Load, *, as_json: bool) -> None:
    """Everything that the settings ask for, until asked to end."""
    _run_gateway_side(load, as_json=as_json)


def run_gateway(load: Load, *, as_json: bool) -> None:
    """The gateway's side alone: the engine, if there is one, runs elsewhere and is an upstream like any other."""
    _run_gateway_side(lambda: _without_engine(load()), as_json=as_json)


def _without_engine(loaded: Loaded) -> Loaded:
    settings = loaded.settings
    alone = settings.model_copy(update={"engine": settings.engine.model_copy(update={"backend": "none"})})
    return Loaded(alone, loaded.origins, loaded.notes, loaded.file)


def run_engine_alone(loaded: Loaded, *, as_json: bool) -> None:
    """The engine on the tenant listener's address; its only key is server.api_key, where that is set."""
    settings = loaded.settings
    check_base_url_port(settings)
    notes = _check_engine(loaded)
    prepare_state_dir(settings)
    server = settings.server
    engine = Process(
        "engine",
        "engine-alone",
        Probe(loopback_url(server.host, server.port, "/health")),
        server.drain_seconds + ENGINE_GRACE_SECONDS,
    )
    with owned_state_dir(settings, ["engine"]):
        check_ports([("server.port", server.host, server.port)])
        say_notes(notes)
        facts = Facts(
            base_url=settings.advertised_base_url,
            key=server.api_key.get_secret_value() if server.api_key else None,
            key_is_configured=server.api_key is not None,
            model=settings.engine_model_name,
        )
        _run(settings, [engine], lambda: announce(facts, as_json=as_json), None)


def _run_gateway_side(load: Load, *, as_json: bool) -> None:
    loaded = load()
    settings = loaded.settings
    check_answerable(settings)
    check_startable(settings)
    with_engine = settings.has_engine
    notes = _check_engine(loaded) if with_engine else loaded.notes
    prepare_state_dir(settings)
    with owned_state_dir(settings, ["gateway", *(["engine"] if with_engine else [])]):
        check_ports(listeners_of(settings))
        say_notes(notes)
        key = tenant_key(settings)
        admin_key_at = "server.admin_key" if settings.server.admin_key else str(admin_key_file(settings))
        settings = with_admin_key(settings)
        for stale in (settings.intake_socket, settings.limits_path, *([settings.engine_socket] if with_engine else [])):
            stale.unlink(missing_ok=True)
        facts = Facts(
            base_url=settings.advertised_base_url,
            key=key,
            key_is_configured=settings.server.api_key is not None,
            model=settings.engine_model_name if with_engine else settings.models[0].name,
            ops_url=loopback_url(settings.server.ops_host, settings.server.ops_port, ""),
            otlp_url=settings.otlp_endpoint,
            admin_key_at=admin_key_at,
        )
        processes = _processes(settings, with_engine=with_engine)
        _run(settings, processes, lambda: announce(facts, as_json=as_json), lambda: _loaded_again(load))


def _loaded_again(load: Load) -> Settings:
    """Settings that a running gateway could take. Raises SettingsError or CliError that says why they can't be used."""
    settings = load().settings
    check_answerable(settings)
    check_startable(settings)
    return with_admin_key(settings)


def _check_engine(loaded: Loaded) -> tuple[str, ...]:
    """What the user should know. Raises SettingsError or CliError when the engine can't be started."""
    settings = loaded.settings
    if settings.engine.backend == "vllm":
        return (*loaded.notes, *check_vllm_startable(loaded))
    check_engine_startable(settings)
    check_engine_installed(settings)
    return loaded.notes


def _processes(settings: Settings, *, with_engine: bool) -> list[Process]:
    """In the order in which they are ended: workers while all they need is there, the observer when all is told."""
    server = settings.server
    scheme = "https" if server.tls_cert else "http"
    workers = [
        Process(
            f"gateway worker {number}" if number else "gateway worker",
            f"worker:{number}" if number else "worker",
            Probe(loopback_url(server.host, server.port, "/healthz", scheme=scheme)),
            server.drain_seconds + GRACE_SECONDS,
        )
        for number in range(server.workers)
    ]
    engine = Process(
        "engine",
        "engine",
        Probe(f"{settings.engine_origin}/health", settings.engine_unix_socket),
        ENGINE_GRACE_SECONDS,
    )
    observer = Process(
        "observer", "observer", Probe(loopback_url(server.ops_host, server.ops_port, "/readyz")), GRACE_SECONDS
    )
    return [*workers, engine, observer] if with_engine else [*workers, observer]


def _run(
    settings: Settings,
    processes: Sequence[Process],
    announce_ready: Callable[[], None],
    load: Callable[[], Settings] | None,
) -> None:
    """Starts, waits until all are ready, keeps them running, ends them. Without `load` nothing can be reloaded."""
    reloadable = {process.name for process in processes if process.role.partition(":")[0] in ("worker", "observer")}

    def taking_settings() -> dict[str, Running]:
        return {name: running for name, running in supervisor.running().items() if name in reloadable}

    reloader = Reloader(settings, load or _nothing_to_reload, taking_settings, say=say)
    parts = [Part(process.name, _starter(process.role, reloader), process.grace_seconds) for process in processes]
    supervisor = Supervisor(parts, say=say)
    with ending_signals() as asked:
        try:
            supervisor.start()
            if _wait_until_ready(supervisor, processes, asked):
                announce_ready()
                while not asked.to_end:
                    supervisor.tick()
                    if asked.to_reload:
                        asked.to_reload = False
                        reloader.ask()
                    reloader.tick()
                    time.sleep(TICK_SECONDS)
        finally:
            if asked.to_end:
                patience = f"up to {settings.server.drain_seconds:g} s"
                say(f"ending; requests that run have {patience}, Ctrl-C once more ends at once")
            supervisor.stop(lambda: asked.to_hurry)


def _starter(role: str, reloader: Reloader) -> Callable[[], ChildProcess]:
    """Starts a process with the settings that are in force then."""
    return lambda: ChildProcess(child_command(role), reloader.line)


def _nothing_to_reload() -> Settings:
    raise CliError("the engine takes its settings at its start only; end it and start it again")


def _wait_until_ready(supervisor: Supervisor, processes: Sequence[Process], asked: Asked) -> bool:
    """True when all are ready, False when asked to end before that. Raises CliError when one can't start."""
    pending = list(processes)
    with waiting([process.name for process in pending]) as show:
        while pending and not asked.to_end:
            supervisor.tick()
            failure = supervisor.start_failure
            if failure is not None:
                raise CliError(f"the {failure.name} could not start: {failure.reason}")
            for process in list(pending):
                if process.ready():
                    process.ready.close()
                    supervisor.mark_ready(process.name)
                    pending.remove(process)
            show([process.name for process in pending])
            time.sleep(TICK_SECONDS)
    return not asked.to_end
