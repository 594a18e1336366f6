"""Which upstreams answer a public model name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

import msgspec

from protocol.errors import ApiError
from settings import Settings
from settings.schema import ENGINE_UPSTREAM


class Upstream(msgspec.Struct, frozen=True):
    """A server that answers requests."""

    name: str
    base_url: str
    """http(s) URL that a surface's path is appended to, without a final slash."""
    unix_socket: str | None = None
    api_key: str | None = None


class Target(msgspec.Struct, frozen=True):
    """One place where a model is answered."""

    upstream: Upstream
    model: str
    """The upstream's own name of it."""


class Route(msgspec.Struct, frozen=True):
    """A public model and its targets, in the order in which they are tried."""

    model: str
    targets: tuple[Target, ...]


class Router:
    """The table of public models, fixed while the worker lives."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._routes = {route.model: route for route in routes}

    @property
    def models(self) -> list[str]:
        """Every public model name, in the order of the configuration."""
        return list(self._routes)

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
        engine = Upstream(ENGINE_UPSTREAM, f"{origin}/v1", unix_socket=str(socket) if socket else None)
        upstreams[engine.name] = engine
        routes.append(Route(settings.engine_model_name, (Target(engine, settings.engine_model_name),)))
    for entry in settings.upstreams:
        upstreams[entry.name] = Upstream(
            name=entry.name,
            base_url=(entry.url or "http://localhost/v1").rstrip("/"),
            unix_socket=entry.unix_socket,
            api_key=environ[entry.api_key_env] if entry.api_key_env else None,
        )
    for model in settings.models:
        targets = []
        for target in model.targets:
            own_name = settings.engine_model_name if target.upstream == ENGINE_UPSTREAM else model.name
            targets.append(Target(upstreams[target.upstream], target.model or own_name))
        routes.append(Route(model.name, tuple(targets)))
    return Router(tuple(routes))
