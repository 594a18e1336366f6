"""The door of the ops listener: what is refused before anything of a request's body is read."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tracing.observer.admin_key import is_key, offered_key

ADMIN = "/admin/v1"
MAX_BODY_BYTES = 2**20
"""More than any request of the admin API needs."""
_CODES = {
    401: "unauthorized", 404: "not_found", 405: "method_not_allowed", 409: "conflict", 413: "body_too_large",
    422: "invalid_request",
}  # fmt: skip


class Door:
    """Pure ASGI. Strangers' requests to the admin API end here; nobody's body grows without end."""

    def __init__(self, app: ASGIApp, admin_key_hash: bytes) -> None:
        self._app = app
        self._key_hash = admin_key_hash

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(headers) if scope["path"].startswith(ADMIN) else None
        if refusal is None and (length := headers.get("content-length", "0")).isdecimal() and _is_over(int(length)):
            refusal = _too_large()
        if refusal is not None:
            answer = error_answer(refusal.status_code, refusal.detail, dict(refusal.headers or {}))
            await answer(scope, receive, send)
            return
        await self._app(scope, _Counted(receive), send)

    def _refusal(self, headers: Headers) -> HTTPException | None:
        """Why these headers do not open the admin API; None where they do."""
        offered = offered_key(headers)
        if not offered:
            message = (
                "the admin API wants the admin key, as `Authorization: Bearer KEY` or `x-api-key: KEY`; "
                "`tokenline up` prints where it is kept"
            )
        elif not is_key(offered, self._key_hash):
            message = "this is not the admin key of this gateway (a tenant's key does not open the admin API)"
        else:
            return None
        return HTTPException(401, message, {"WWW-Authenticate": "Bearer"})


class _Counted:
    """ASGI receive that raises 413 once a body is too large, whatever its headers said."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if _is_over(self._bytes):
            raise _too_large()
        return message


def error_answer(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as the ops listener tells it."""
    return JSONResponse({"error": {"code": _CODES.get(status, "error"), "message": message}}, status, headers)


def _is_over(size: int) -> bool:
    return size > MAX_BODY_BYTES


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is over {MAX_BODY_BYTES} bytes", {"Connection": "close"})
