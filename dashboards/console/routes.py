"""Every route of the console, and what each page is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dashboards.console.guard import Guard
from dashboards.console.rendering import ROOT, Renderer, json_answer, redirect, request_link, texts_of
from tracing.observer.core import Observer
from tracing.observer.lookup import latest_requests, requests_with_id, slowest_requests

LISTED = 20
WINDOWS = ("15m", "1h", "24h", "7d")
DEFAULT_WINDOW = "1h"
MAX_ID = 512

Handler = Callable[[Request], Awaitable[Response]]


def console(admin_key_hash: bytes) -> Callable[[Observer], APIRouter]:
    """What the observer makes the console's routes with. `admin_key_hash` is the key's SHA-256."""

    def routes(observer: Observer) -> APIRouter:
        renderer = Renderer()
        guard = Guard(renderer, observer.clock, admin_key_hash=admin_key_hash)
        pages = _Pages(observer, renderer)

        def behind(handler: Handler) -> Handler:
            async def answer(request: Request) -> Response:
                return guard.refusal(request) or await handler(request)

            return answer

        router = APIRouter()
        router.add_route(f"{ROOT}/login", guard.show_form, methods=["GET"])
        router.add_route(f"{ROOT}/login", guard.log_in, methods=["POST"])
        router.add_route(f"{ROOT}/logout", guard.log_out, methods=["POST"])
        router.add_route(ROOT, behind(pages.home), methods=["GET"])
        router.add_route(f"{ROOT}/requests", behind(pages.search), methods=["GET"])
        router.add_route(f"{ROOT}/requests/{{any_id:path}}", behind(pages.one), methods=["GET"])
        router.add_route(f"{ROOT}/{{rest:path}}", behind(pages.nothing), methods=["GET"])
        return router

    return routes


class _Pages:
    """The pages for who was let in. Numbers are those of the admin API, from the same place."""

    def __init__(self, observer: Observer, renderer: Renderer) -> None:
        self._observer = observer
        self._renderer = renderer

    async def home(self, request: Request) -> Response:
        """GET /console: the slowest and the latest."""
        window = request.query_params.get("window", DEFAULT_WINDOW)
        misread = None
        try:
            slowest = await slowest_requests(self._observer, window, None, LISTED)
        except ValueError:
            misread, window = window[:40], DEFAULT_WINDOW
            slowest = await slowest_requests(self._observer, window, None, LISTED)
        return self._renderer.page(
            "home.html",
            request,
            slowest=slowest,
            latest=await latest_requests(self._observer, LISTED),
            window=window,
            windows=WINDOWS,
            misread=misread,
            base_url=self._observer.settings.advertised_base_url,
        )

    async def search(self, request: Request) -> Response:
        """GET /console/requests?id=ID: what the search box sends."""
        any_id = request.query_params.get("id", "").strip()
        return redirect(request_link(request, any_id) if any_id else ROOT)

    async def one(self, request: Request) -> Response:
        """GET /console/requests/ID: the request, a list where several have the id, or help."""
        any_id = request.path_params["any_id"].strip()[:MAX_ID]
        if not any_id:
            return redirect(ROOT)
        as_json = request.query_params.get("format") == "json"
        matches = await requests_with_id(self._observer, any_id, spans=as_json, language=texts_of(request).lang)
        if not matches:
            return self._missing(request, any_id)
        if as_json:
            return json_answer({"matches": matches})
        # A client may have sent another request's id as its own: the one that we gave comes first.
        own = [match for match in matches if match["request_id"] == any_id]
        chosen = own or matches
        if len(chosen) > 1 or "all" in request.query_params:
            return self._renderer.page("matches.html", request, any_id=any_id, matches=matches)
        return await self._sheet(request, chosen[0]["request_id"], any_id, len(matches) - 1)

    async def nothing(self, request: Request) -> Response:
        """Every other path below /console."""
        return redirect(ROOT) if not request.path_params["rest"] else self._missing(request, None)

    async def _sheet(self, request: Request, request_id: str, any_id: str, others: int) -> Response:
        found = await requests_with_id(self._observer, request_id, spans=True, language=texts_of(request).lang)
        record = next((one for one in found if one["request_id"] == request_id), None)
        if record is None:  # trimmed between the two questions
            return self._missing(request, any_id)
        return self._renderer.page("request.html", request, r=record, any_id=any_id, others=others)

    def _missing(self, request: Request, any_id: str | None) -> Response:
        values: dict[str, Any] = {"any_id": any_id, "rows": self._observer.settings.tracing.store_max_rows}
        return self._renderer.page("missing.html", request, 404, **values)
