"""Which upstreams answer a public model name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

import msgspec

from protocol.errors import ApiError
from settings import Settings
from settings.schema import DEFAULT_SURFACES, ENGINE_SURFACES, ENGINE_UPSTREAM


class UpstreamLimits(msgspec.Struct, frozen=True):
    """Time limits of an upstream's own, seconds; None: the server's."""

    connect: float | None = None
    first_byte: float | None = None
    idle: float | None = None


class Upstream(msgspec.Struct, frozen=True):
    """A server that answers requests."""

    name: str
    base_url: str
    """http(s) URL that a surface's path is appended to, without a final slash."""
    unix_socket: str | None = None
    api_key: str | None = None
    api_key_header: str = "authorization"
    """Where the key goes; in `authorization` after `Bearer `."""
    surfaces: frozenset[str] = frozenset(DEFAULT_SURFACES)
    """What it speaks."""
    health_path: str | None = "/models"
    """Below base_url; None: not checked."""
    limits: UpstreamLimits = UpstreamLimits()
    place: str = ""
    """Where it is, and its name: what is known of an upstream, and its connections, are good for one place alone."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "place", f"{self.name} {self.base_url} {self.unix_socket or ''}")


class Target(msgspec.Struct, frozen=True):
    """One place where a model is answered."""

    upstream: Upstream
    model: str
    """The upstream's own name of it."""
    weight: float = 1.0
    priority: int = 0
    """Lower ones are tried first."""


class Route(msgspec.Struct, frozen=True):
    """A public model and its targets."""

    model: str
    targets: tuple[Target, ...]
    affinity: bool = False
    """Requests that begin alike prefer the same target."""


class Router:
    """The table of public models. It never changes: a worker that is reloaded gets another one."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._routes = {route.model: route for route in routes}

    @property
    def models(self) -> list[str]:
        """Every public model name, in the order of the configuration."""
        return list(self._routes)

    @property
    def upstreams(self) -> list[Upstream]:
        """Every upstream that some model leads to."""
        found = {t.upstream.name: t.upstream for route in self._routes.values() for t in route.targets}
        return list(found.values())

    @property
    def checked(self) -> list[Upstream]:
        """Those whose health is asked for."""
        return [upstream for upstream in self.upstreams if upstream.health_path]

    def choose(self, model: str) -> Route:
        """The route of a model. Raises ApiError 404 with the nearest names."""
        route = self._routes.get(model)
        if route is None:
            raise not_found(model, self.models)
        return route


def not_found(model: str, visible: list[str]) -> ApiError:
    """The 404 of a model name, with the nearest of those that the asker may know of."""
    near = difflib.get_close_matches(model, visible, n=3, cutoff=0.4)
    if near:
        help_text = f"Did you mean {' or '.join(map(repr, near))}?"
    elif visible:
        help_text = f"Models here: {', '.join(visible[:10])}."
    else:
        help_text = "No model is configured here."
    return ApiError(404, "model_not_found", f"The model {_shown(model)!r} does not exist. {help_text}", param="model")


def _shown(model: str) -> str:
    """A model name as an error may repeat it: not a key that was put in its place."""
    return "sk-…" if model.startswith("sk-") else model


def router_from(settings: Settings, environ: Mapping[str, str] = os.environ) -> Router:
    """The table that the settings describe. The co-located engine is an upstream named `engine` with one model."""
    upstreams: dict[str, Upstream] = {}
    routes: list[Route] = []
    if settings.has_engine:
        socket = settings.engine_unix_socket
        origin = "http://localhost" if socket else settings.engine_origin
        spoken = frozenset(DEFAULT_SURFACES if settings.engine.backend == "vllm" else ENGINE_SURFACES)
        engine = Upstream(ENGINE_UPSTREAM, f"{origin}/v1", unix_socket=str(socket) if socket else None, surfaces=spoken)
        upstreams[engine.name] = engine
        routes.append(Route(settings.engine_model_name, (Target(engine, settings.engine_model_name),)))
    for entry in settings.upstreams:
        upstreams[entry.name] = Upstream(
            name=entry.name,
            base_url=(entry.url or "http://localhost/v1").rstrip("/"),
            unix_socket=entry.unix_socket,
            api_key=environ[entry.api_key_env] if entry.api_key_env else None,
            api_key_header=entry.api_key_header,
            surfaces=frozenset(entry.surfaces),
            health_path=entry.health_path or None,
            limits=UpstreamLimits(
                entry.connect_timeout_seconds, entry.first_byte_timeout_seconds, entry.idle_timeout_seconds
            ),
        )
    for model in settings.models:
        targets = []
        for target in model.targets:
            is_ours = settings.has_engine and target.upstream == ENGINE_UPSTREAM
            own_name = settings.engine_model_name if is_ours else model.name
            upstream = upstreams[target.upstream]
            targets.append(Target(upstream, target.model or own_name, target.weight, target.priority))
        routes.append(Route(model.name, tuple(targets), model.affinity == "prefix"))
    return Router(tuple(routes))
