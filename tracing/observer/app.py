"""The ops listener: metrics and health for anybody who reaches it, the admin API for holders of the admin key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from tracing.observer.core import Observer
from tracing.observer.door import ADMIN, Door, error_answer
from tracing.observer.lookup import requests_with_id, slowest_requests
from tracing.observer.samples import MAX_IDS, live_samples, samples_of
from tracing.observer.scrape import MetricsPage
from tracing.observer.texts import Language
from tracing.observer.window_verdict import window_verdict

MAX_SLOW = 1_000
Pages = Callable[[Observer], APIRouter]
"""Makes routes for people of an observer; they guard themselves."""


def ops_app(
    observer: Observer,
    metrics: MetricsPage,
    *,
    admin_key_hash: bytes,
    routers: Sequence[APIRouter] = (),
    pages: Pages | None = None,
) -> FastAPI:
    """Every route of the ops listener. `admin_key_hash` is the key's SHA-256; `routers` go under /admin/v1."""
    app = FastAPI(title="Tokenline ops", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.include_router(_open_routes(observer, metrics))
    app.add_middleware(Door, admin_key_hash=admin_key_hash)
    admin = APIRouter(prefix=ADMIN)
    admin.include_router(_request_routes(observer))
    for router in routers:
        admin.include_router(router)
    app.include_router(admin)
    if pages is not None:
        app.include_router(pages(observer))
    return app


def _open_routes(observer: Observer, page: MetricsPage) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        observer.workers.publish()
        body, content_type = await page.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        missing = observer.missing()
        body = {"status": "waiting", "missing": missing} if missing else {"status": "ready"}
        return JSONResponse(body, 503 if missing else 200)

    return router


def _request_routes(observer: Observer) -> APIRouter:
    router = APIRouter()

    @router.get("/requests/{any_id}")
    async def requests(any_id: str, spans: bool = False, lang: Language = "en") -> dict[str, Any]:
        """Every request with this request id, client's own id, trace id or traceparent; newest first."""
        matches = await requests_with_id(observer, any_id, spans=spans, language=lang)
        if not matches:
            raise HTTPException(
                404,
                f"no request {any_id!r} is known here: it may still run, be older than the newest "
                f"{observer.settings.tracing.store_max_rows} requests (tracing.store_max_rows), or have gone through "
                "another gateway. Ids that are found: x-request-id, x-tokenline-request-id, a trace id, a traceparent",
            )
        return {"matches": matches}

    @router.post("/requests")
    async def named(ids: Annotated[list[str], Body(embed=True, max_length=MAX_IDS)]) -> dict[str, Any]:
        """Figures and stages of the requests with these `x-tokenline-request-id`s, those that are known, by id."""
        return {"requests": await samples_of(observer, ids)}

    @router.get("/slow")
    async def slow(
        window: str = "1h",
        model: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_SLOW)] = 20,
        by: Literal["slow", "ttft", "e2e", "tpot"] = "slow",
        key: str | None = None,
        outcome: str | None = None,
        stage: str | None = None,
    ) -> dict[str, Any]:
        """The slowest requests that began in the window: by TTFT, or by E2E where there is none; or by what is asked.

        `key` is a key's alias; `stage` the stage that took most of the time.
        """
        asked = {"by": by, "key_alias": key, "outcome": outcome, "stage": stage}
        try:
            found = await slowest_requests(observer, window, model, limit, **asked)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        return {"window": window, "model": model, "requests": found}

    @router.get("/window")
    async def window(window: str = "1h", model: str | None = None, lang: Language = "en") -> dict[str, Any]:
        """What the slowest requests of the window have that the others have not."""
        try:
            return await window_verdict(observer, window, model, lang)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    @router.get("/live")
    async def live(window: str = "1h", model: str | None = None) -> dict[str, Any]:
        """Samples of what ended well in the window, without load tests: what `bench compare A --live` reads."""
        try:
            return await live_samples(observer, window, model)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    return router


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    message = error.detail
    if error.status_code == 404 and message == "Not Found":
        message = (
            f"there is nothing at {request.url.path}; the console is at /console, the admin API under /admin/v1, "
            "metrics are at /metrics"
        )
    return error_answer(error.status_code, message, dict(error.headers or {}))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = (f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors())
    return error_answer(422, "; ".join(faults))
