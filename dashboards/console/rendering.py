"""Pages as answers: templates, how numbers are written, and the headers that keep a page to itself."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from dashboards.console import charts
from dashboards.console.ranges import figures, ranges
from dashboards.console.span_tree import span_tree
from dashboards.console.texts import LANGUAGES, Texts, language

ROOT = "/console"
_KEPT_TO_ITSELF = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Renderer:
    """Makes answers. Every value is escaped by the templates; styles and scripts run by a nonce alone."""

    def __init__(self) -> None:
        self._templates = Environment(
            loader=PackageLoader("dashboards.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters |= {"ms": ms, "ms3": ms3, "time": time, "percent": percent, "utc": utc}
        self._templates.globals |= {
            "charts": charts,
            "figures": figures,
            "ranges": ranges,
            "span_tree": span_tree,
            "quote_shell": shlex.quote,
        }
        # Now and not at the first question: an upgrade on disk must not mix its templates with this process's code.
        for name in self._templates.list_templates():
            self._templates.get_template(name)

    def page(
        self,
        template: str,
        request: Request,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        **values: Any,
    ) -> Response:
        """The page in the request's language."""
        texts, nonce = texts_of(request), secrets.token_urlsafe(16)
        body = self._templates.get_template(template).render(
            t=texts,
            nonce=nonce,
            link=lambda path, **query: link(request, path, **query),
            link_of=lambda request_id, **query: request_link(request, request_id, **query),
            other_languages=_other_languages(request, texts.lang),
            **values,
        )
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; img-src data:; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        )
        sent = {
            **_KEPT_TO_ITSELF,
            "content-security-policy": policy,
            "vary": "Accept-Language, Cookie",
            **(headers or {}),
        }
        return HTMLResponse(body, status, sent)


def json_answer(body: Any) -> Response:
    """The record itself."""
    return JSONResponse(body, headers=_KEPT_TO_ITSELF)


def redirect(path: str) -> Response:
    """To another page of ours, by GET."""
    return RedirectResponse(path, 303, _KEPT_TO_ITSELF)


def texts_of(request: Request) -> Texts:
    """Texts in the language that the request asks for."""
    return Texts(language(request.query_params.get("lang", ""), request.headers.get("accept-language", "")))


def link(request: Request, path: str, **query: str | None) -> str:
    """A path below /console; a language that was asked for goes along."""
    asked = request.query_params.get("lang", "")
    wanted = {"lang": asked if asked in LANGUAGES else None, **query}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    return ROOT + quote(path, safe="/") + (f"?{urlencode(wanted)}" if wanted else "")


def request_link(request: Request, request_id: str, **query: str | None) -> str:
    """The page of one request. A slash in an id is a part of the id."""
    return link(request, "/requests/", **query).replace("/requests/", f"/requests/{quote(request_id, safe='')}", 1)


def _other_languages(request: Request, lang: str) -> list[tuple[str, str, str]]:
    """(code, name, the same page in it)."""
    query = {name: value for name, value in request.query_params.items() if name != "lang"}
    return [
        (code, texts["lang_name"], f"{quote(request.scope['path'], safe='/')}?{urlencode({**query, 'lang': code})}")
        for code, texts in LANGUAGES.items()
        if code != lang
    ]


def ms(value: float | None) -> str:
    """Milliseconds in a column."""
    return "–" if value is None else f"{value:,.2f}"


def ms3(value: float | None) -> str:
    """Milliseconds to the microsecond."""
    return "–" if value is None else f"{value:,.3f}"


def time(value: float | None) -> str:
    """A duration given in ms, for a headline."""
    if value is None:
        return "–"
    if abs(value) >= 10_000:
        return f"{value / 1e3:,.2f} s"
    return f"{value:,.0f} ms" if abs(value) >= 1_000 else f"{value:.1f} ms" if abs(value) >= 10 else f"{value:.2f} ms"


def percent(share: float | None) -> str:
    """A share of 1 as percent."""
    return "" if share is None else f"{share * 100:.1f} %"


def utc(started: str) -> str:
    """An ISO moment to the millisecond."""
    return datetime.fromisoformat(started).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
