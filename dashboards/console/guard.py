"""The console's door: a session's cookie, or the admin key in a header; the form that turns a key into a session."""

from __future__ import annotations

import math
import re
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dashboards.console.rendering import ROOT, Renderer, link, redirect
from dashboards.console.sessions import LIFETIME_SECONDS, Sessions, Throttle
from tracing.clock import Clock
from tracing.observer.admin_key import is_key, offered_key

MAX_FORM_BYTES = 8 * 1024
_LOCAL = re.compile(rf"{ROOT}(?:[/?][!-\[\]-~]*)?\Z")
"""Our own paths: printable ASCII, no backslash."""
_OURS = ("same-origin", "none")


class Guard:
    """Lets in who has a session or the key; shows the door to everybody else."""

    def __init__(self, renderer: Renderer, clock: Clock, *, admin_key_hash: bytes) -> None:
        self._renderer = renderer
        self._key_hash = admin_key_hash
        self._sessions = Sessions(clock)
        self._throttle = Throttle(clock)

    def refusal(self, request: Request) -> Response | None:
        """None for who may see the page; else what they get instead."""
        if self._sessions.is_valid(request.cookies.get(cookie_name(request), "")):
            return None
        key = offered_key(request.headers)
        if key:
            return self._refused(request, key)
        if request.headers.get("sec-fetch-site") == "cross-site" and request.method == "GET":
            # A SameSite=Strict cookie does not come along when another site's link is followed. The page that this
            # one goes on to is asked for by ourselves, and then it does.
            return self._renderer.page("passing.html", request, onward=_address(request))
        return redirect(link(request, "/login", next=_address(request)))

    async def show_form(self, request: Request) -> Response:
        """GET /console/login."""
        target = local_path(request.query_params.get("next", ""))
        if self._sessions.is_valid(request.cookies.get(cookie_name(request), "")):
            return redirect(target)
        return self._form(request, target)

    async def log_in(self, request: Request) -> Response:
        """POST /console/login: a session for who knows the key."""
        if request.headers.get("sec-fetch-site", "none") not in _OURS:
            return self._form(request, ROOT, 403, "login_foreign")
        body = await _small_body(request)
        if body is None:
            return self._form(request, ROOT, 413, "login_large")
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        target = local_path(fields.get("next", [""])[0])
        key = fields.get("key", [""])[0].strip()
        if not key:
            return self._form(request, target, 422, "login_empty")
        refused = self._refused(request, key, target)
        if refused is not None:
            return refused
        answer = redirect(target)
        answer.set_cookie(
            cookie_name(request),
            self._sessions.issue(),
            max_age=LIFETIME_SECONDS,
            path=ROOT,
            secure=_by_https(request),
            httponly=True,
            samesite="strict",
        )
        return answer

    async def log_out(self, request: Request) -> Response:
        """POST /console/logout: the session ends here and in the browser."""
        self._sessions.end(request.cookies.get(cookie_name(request), ""))
        answer = redirect(link(request, "/login"))
        answer.delete_cookie(
            cookie_name(request), path=ROOT, secure=_by_https(request), httponly=True, samesite="strict"
        )
        return answer

    def _refused(self, request: Request, key: str, target: str = ROOT) -> Response | None:
        """None when the key is right. After many wrong ones no key is looked at for a while."""
        address = request.client.host if request.client else ""
        wait = math.ceil(self._throttle.wait_seconds(address))
        if wait > 0:
            return self._form(request, target, 429, "login_slow", {"retry-after": str(wait)}, seconds=wait)
        if is_key(key, self._key_hash):
            return None
        self._throttle.failed(address)
        return self._form(request, target, 401, "login_wrong", {"www-authenticate": "Bearer"})

    def _form(
        self,
        request: Request,
        target: str,
        status: int = 200,
        fault: str | None = None,
        headers: dict[str, str] | None = None,
        **values: object,
    ) -> Response:
        return self._renderer.page(
            "login.html",
            request,
            status,
            headers,
            target=target,
            fault=fault,
            values=values,
            hours=LIFETIME_SECONDS // 3600,
        )


def cookie_name(request: Request) -> str:
    """Cookies know no ports: the name keeps two instances on one host apart."""
    server = request.scope.get("server") or ("", None)
    return f"tokenline_console_{server[1] or 0}"


def local_path(target: str) -> str:
    """`target` when it is a page of the console, else its start page. Never another host."""
    return target if len(target) <= 2_000 and _LOCAL.match(target) and not target.startswith(f"{ROOT}/log") else ROOT


def _address(request: Request) -> str:
    """Path and query as they came: percent-encoded ASCII."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    query: bytes = request.scope["query_string"]
    return local_path((raw.partition(b"?")[0] + (b"?" + query if query else b"")).decode("latin-1"))


def _by_https(request: Request) -> bool:
    """Whether the browser came by TLS, here or at a proxy. A lie here harms only who tells it."""
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip()
    return request.scope["scheme"] == "https" or forwarded == "https"


async def _small_body(request: Request) -> bytes | None:
    """The body, or None when it is larger than a key can be."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_FORM_BYTES:
                return None
    except ClientDisconnect:
        return b""
    return bytes(body)
