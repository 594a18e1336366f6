"""The ops listener: metrics and health for anybody who reaches it, the admin API for holders of the admin key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from protocol.ids import parse_traceparent
from tracing.observer.core import Observer
from tracing.observer.scrape import MetricsPage
from tracing.observer.view import request_view, slow_view, span_view, trace_of
from tracing.observer.windows import window_ns

MAX_SLOW = 1_000


def ops_app(
    observer: Observer, metrics: MetricsPage, *, admin_key_hash: bytes, routers: Sequence[APIRouter] = ()
) -> FastAPI:
    """Every route of the ops listener. `admin_key_hash` is the key's SHA-256; `routers` go under /admin/v1."""
    app = FastAPI(title="Tokenline ops", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.include_router(_open_routes(observer, metrics))
    admin = APIRouter(prefix="/admin/v1", dependencies=[Depends(_admin_key(admin_key_hash))])
    admin.include_router(_request_routes(observer))
    for router in routers:
        admin.include_router(router)
    app.include_router(admin)
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
    async def requests(any_id: str, spans: bool = False) -> dict[str, Any]:
        """Every request with this request id, client's own id, trace id or traceparent; newest first."""
        parsed = parse_traceparent(any_id.strip())
        rows = await run_in_threadpool(observer.store.find, parsed[0] if parsed else any_id.strip())
        if not rows:
            raise HTTPException(
                404,
                f"no request {any_id!r} is known here: it may still run, be older than the newest "
                f"{observer.settings.tracing.store_max_rows} requests (tracing.store_max_rows), or have gone through "
                "another gateway. Ids that are found: x-request-id, x-tokenline-request-id, a trace id, a traceparent",
            )
        matches = []
        for row in reversed(rows):
            view = request_view(row, complete=not observer.join.waits_for(row.ledger))
            if spans:
                stored = await run_in_threadpool(observer.store.spans_of, row.ledger.trace_id)
                waiting = observer.join.spans_of(row.ledger.trace_id)
                view["spans"] = [span_view(span) for span in trace_of(row, [*stored, *waiting])]
            matches.append(view)
        return {"matches": matches}

    @router.get("/slow")
    async def slow(
        window: str = "1h", model: str | None = None, limit: Annotated[int, Query(ge=1, le=MAX_SLOW)] = 20
    ) -> dict[str, Any]:
        """The slowest requests that began in the window: by TTFT, or by E2E where there is none."""
        try:
            since_ns = observer.clock.wall_ns() - window_ns(window)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        rows = await run_in_threadpool(observer.store.slow, since_ns=since_ns, model=model, limit=limit)
        return {"window": window, "model": model, "requests": [slow_view(row) for row in rows]}

    return router


def _admin_key(expected_hash: bytes) -> Any:
    """A dependency that lets only the admin key in. Digests are compared, in constant time."""

    def check(request: Request) -> None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        offered = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()
        if not offered:
            raise HTTPException(
                401,
                "the admin API wants the admin key, as `Authorization: Bearer KEY` or `x-api-key: KEY`; "
                "`tokenline up` prints where it is kept",
                {"WWW-Authenticate": "Bearer"},
            )
        if not hmac.compare_digest(hashlib.sha256(offered.encode()).digest(), expected_hash):
            raise HTTPException(
                401,
                "this is not the admin key of this gateway (a tenant's key does not open the admin API)",
                {"WWW-Authenticate": "Bearer"},
            )

    return check


_CODES = {401: "unauthorized", 404: "not_found", 405: "method_not_allowed", 409: "conflict", 422: "invalid_request"}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    message = error.detail
    if error.status_code == 404 and message == "Not Found":
        message = f"there is nothing at {request.url.path}; the admin API is under /admin/v1, metrics are at /metrics"
    return _error(error.status_code, message, error.headers)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = (f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors())
    return _error(422, "; ".join(faults), None)


def _error(status: int, message: str, headers: Any) -> JSONResponse:
    return JSONResponse({"error": {"code": _CODES.get(status, "error"), "message": message}}, status, headers)
