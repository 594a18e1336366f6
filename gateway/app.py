"""The FastAPI application of a relay worker: every route visible at one glance."""

from __future__ import annotations

import re

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.routing import Route

from gateway.endpoint import Endpoint
from gateway.exchange import Exchange, without_keys
from gateway.relay import Relay
from gateway.surfaces.catalogue import SURFACES
from gateway.surfaces.models import as_anthropic, list_models, show_model
from gateway.surfaces.openapi import describe
from gateway.surfaces.shapes import ANTHROPIC_ERRORS
from gateway.surfaces.surface import Surface
from protocol.errors import ApiError
from tracing.spans import GATEWAY_RESOURCE

PREFIXES = ("/api", "/api/v1", "/v1")
DOUBLED = ("/api/v1/v1", "/v1/v1")
"""Accepted too, with a header that names the right base_url."""
HELLO = "/api/hello"
"""Where Claude Code looks whether its base_url answers."""


def build_app(relay: Relay, base_url: str) -> FastAPI:
    """The tenant listener's application. `base_url` is the advertised one, named where a client got it wrong."""
    app = FastAPI(title="Tokenline", docs_url=None, redoc_url=None, openapi_url=None)
    hello = FixedEndpoint(b'{"message":"hello"}')
    description = FixedEndpoint(describe(SURFACES, base_url, str(GATEWAY_RESOURCE["service.version"])))
    for prefix in (*PREFIXES, *DOUBLED):
        hint = base_url if prefix in DOUBLED else None
        for surface in SURFACES:
            app.router.routes.append(Route(prefix + surface.path, SurfaceEndpoint(relay, surface, hint)))
        app.router.routes.append(Route(prefix + "/models", ModelsEndpoint(relay, hint)))
        app.router.routes.append(Route(prefix + "/models/{model:path}", ModelsEndpoint(relay, hint)))
        app.router.routes.append(Route(prefix + HELLO, hello))
        app.router.routes.append(Route(prefix + "/openapi.json", description))
    app.router.routes.append(Route(HELLO, hello))
    app.router.routes.append(Route("/healthz", health, methods=["GET"]))
    app.router.default = UnknownPathEndpoint(base_url)
    app.router.redirect_slashes = False
    return app


def data_plane(app: FastAPI) -> dict[str, Endpoint]:
    """Path -> endpoint of the application's data-plane routes: found by one look-up, not by trying every route."""
    return {
        route.path: route.endpoint
        for route in app.router.routes
        if isinstance(route, Route) and isinstance(route.endpoint, SurfaceEndpoint)
    }


async def health(_request: object) -> JSONResponse:
    """The worker answers."""
    return JSONResponse({"status": "ok"})


class SurfaceEndpoint(Endpoint):
    """A surface's data plane."""

    def __init__(self, relay: Relay, surface: Surface, hint: str | None) -> None:
        super().__init__(hint)
        self._relay = relay
        self._surface = surface
        self.errors = surface.errors

    async def serve(self, exchange: Exchange) -> None:
        await self._relay.serve(exchange, self._surface)


class ModelsEndpoint(Endpoint):
    """`GET /models` and `GET /models/{id}`: what the key may use."""

    method = "GET"

    def __init__(self, relay: Relay, hint: str | None) -> None:
        super().__init__(hint)
        self._relay = relay

    async def serve(self, exchange: Exchange) -> None:
        exchange.ledger.surface = "models"
        key = await self._relay.authenticate(exchange)
        wanted = exchange.scope["path_params"].get("model")
        router = self._relay.router
        if exchange.errors is ANTHROPIC_ERRORS:
            await exchange.answer_json(as_anthropic(router, key, wanted))
        else:
            await exchange.answer_json(list_models(router, key) if wanted is None else show_model(router, key, wanted))


class FixedEndpoint(Endpoint):
    """Answers anybody who asks with the same JSON."""

    method = "GET"

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._body = body

    async def serve(self, exchange: Exchange) -> None:
        await exchange.answer_json(self._body)


OPS_PATHS = ("/metrics", "/console", "/admin")


class UnknownPathEndpoint(Endpoint):
    """Whatever no route takes: says what the base_url should be."""

    method = None

    def __init__(self, base_url: str) -> None:
        super().__init__()
        self._base_url = base_url

    async def serve(self, exchange: Exchange) -> None:
        raise wrong_base_url(exchange.scope["path"], self._base_url)


def wrong_base_url(path: str, base_url: str) -> ApiError:
    """The 404 of an unknown path, with the likeliest slip."""
    shown = re.sub(r"[^\x21-\x7e…]", "?", without_keys(path))[:200]
    known = [*(surface.path for surface in SURFACES), "/models"]
    ending = next((end for end in sorted(known, key=len, reverse=True) if path.rstrip("/").endswith(end)), None)
    if ending and path.rstrip("/").removesuffix(ending).endswith(ending):
        slip = "Your base_url already holds a whole path. "
    elif ending:
        slip = "The part before it is not one of this gateway's prefixes (/api, /api/v1, /v1). "
    elif path.startswith(OPS_PATHS):
        slip = "Metrics, console and admin API are on the ops listener (server.ops_port), not here. "
    else:
        slip = ""
    return ApiError(
        404,
        "wrong_base_url",
        f"There is nothing at {shown}. {slip}Set base_url to {base_url} and let the client append the path.",
        extra_headers=(("x-tokenline-hint", f"base_url={base_url}"),),
    )
