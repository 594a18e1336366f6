"""The engine's HTTP application: every route visible at one glance.

The data plane is plain ASGI; control routes (health, metrics, models) are a FastAPI application behind it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from backend_engine.access import OneKey
from backend_engine.asgi import Message, Receive, Scope, Send, request_id_of, send_error
from backend_engine.endpoints import GenerationEndpoint, JsonEndpoint, detokenize, embeddings, tokenize
from backend_engine.frontend import Frontend
from protocol.errors import ApiError
from protocol.timings import HostIdentity

log = logging.getLogger(__name__)

PREFIXES = ("/api", "/api/v1", "/v1")
DOUBLED = ("/api/v1/v1", "/v1/v1")
"""Taken too: a client whose base_url ends in /v1 and that appends /v1 again."""
OPEN_PATHS = frozenset({"/health", "/metrics", "/advice"})
"""They need no key: numbers only, for whoever watches the process."""

Endpoint = Callable[[Scope, Receive, Send, int], Awaitable[None]]


class EngineApp:
    """Sends a request to its endpoint. With `key`, everything but OPEN_PATHS needs it."""

    def __init__(self, frontend: Frontend, host: HostIdentity, base_url: str, key: OneKey | None) -> None:
        self._clock = frontend.clock
        self._base_url = base_url
        self._key = key
        self._control = control_routes(frontend)
        endpoints: dict[str, Endpoint] = {
            "/chat/completions": GenerationEndpoint(frontend, host, "chat"),
            "/completions": GenerationEndpoint(frontend, host, "completions"),
            "/embeddings": JsonEndpoint(frontend, embeddings),
            "/tokenize": JsonEndpoint(frontend, tokenize),
            "/detokenize": JsonEndpoint(frontend, detokenize),
        }
        self._endings = (*endpoints, "/models")
        self._posts = {
            prefix + path: endpoint for prefix in (*PREFIXES, *DOUBLED) for path, endpoint in endpoints.items()
        }
        self._posts |= {path: endpoints[path] for path in ("/tokenize", "/detokenize")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, in ASGI."""
        received_ns = self._clock.mono_ns()
        if scope["type"] != "http":
            raise RuntimeError(f"this application speaks HTTP, not {scope['type']}")
        watched = _Watched(send)
        try:
            await self._dispatch(scope, receive, watched.send, received_ns)
        except ApiError as error:
            await send_error(send, receive, error, request_id_of(scope))
        except Exception:
            log.exception("a request to %s failed", scope["path"])
            if not watched.has_begun:
                failure = ApiError(500, "internal_error", "The engine failed on this request; its log says why.")
                await send_error(send, receive, failure, request_id_of(scope))

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send, received_ns: int) -> None:
        path: str = scope["path"]
        if self._key is not None and path not in OPEN_PATHS:
            self._key.check(scope)
        endpoint = self._posts.get(path)
        if endpoint is None:
            if path in OPEN_PATHS or "/models" in path:
                await self._control(scope, receive, send)
                return
            raise self._unknown(path)
        if scope["method"] != "POST":
            raise ApiError(
                405,
                "method_not_allowed",
                f"{path} takes POST, not {scope['method']}.",
                extra_headers=(("allow", "POST"),),
            )
        await endpoint(scope, receive, send, received_ns)

    def _unknown(self, path: str) -> ApiError:
        """404 with the likeliest slip."""
        shown = re.sub(r"[^\x21-\x7e]", "?", path)[:200]
        ending = next((end for end in self._endings if path.rstrip("/").endswith(end)), None)
        slip = ""
        if ending is not None:
            doubled = any(known in path.rstrip("/").removesuffix(ending) for known in self._endings)
            slip = "Your base_url already holds a whole path. " if doubled else "Its prefix is not one that is served. "
        return ApiError(
            404,
            "wrong_base_url",
            f"There is nothing at {shown}. {slip}Set base_url to {self._base_url} and let the client append the path.",
            extra_headers=(("x-tokenline-hint", f"base_url={self._base_url}"),),
        )


class _Watched:
    """A `send` that remembers whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def send(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)


def control_routes(frontend: Frontend) -> FastAPI:
    """Health, metrics and models."""
    app = FastAPI(title="Tokenline engine", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.get("/health")
    async def health() -> Response:
        """200 once requests can be served."""
        if frontend.is_serving:
            return JSONResponse({"status": "ok", "model": frontend.model})
        status = "loading" if frontend.failure is None else "failed"
        return JSONResponse({"status": status, "model": frontend.model}, 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus text or OpenMetrics, by the Accept header."""
        page, content_type = frontend.metrics.page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    @app.get("/advice")
    async def advice() -> Response:
        """The settings that hold throughput back, by the engine's own data."""
        return JSONResponse({"model": frontend.model, **frontend.metrics.adviser.report()})

    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model(frontend)]})

    async def model(name: str) -> JSONResponse:
        if name != frontend.model:
            raise ApiError(
                404,
                "model_not_found",
                f"The model '{name[:100]}' is not served here; this engine serves '{frontend.model}'.",
                param="model",
            )
        return JSONResponse(_model(frontend))

    for prefix in (*PREFIXES, *DOUBLED):
        app.add_api_route(f"{prefix}/models", models)
        app.add_api_route(f"{prefix}/models/{{name:path}}", model)

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        headers = {name.decode(): value.decode("latin-1") for name, value in error.headers()}
        return Response(error.openai_body(request_id_of(request.scope)), error.status, headers, "application/json")

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        message = f"{request.method} {request.url.path[:200]} is not served here."
        return await refuse(request, ApiError(error.status_code, code, message))

    return app


def _model(frontend: Frontend) -> dict[str, object]:
    ready = frontend.ready
    return {
        "id": frontend.model,
        "object": "model",
        "created": frontend.started_s,
        "owned_by": "tokenline",
        "max_model_len": ready.max_model_len if ready is not None else None,
    }
