"""Whether the API is where base_url says, whether the key opens it, and which models it lists."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from loadtest.doctor.asking import Asker, Reply
from loadtest.doctor.finding import Finding, fail, ok, skip, warn
from loadtest.doctor.given import origin_of
from loadtest.doctor.network import speaks_tls

HINT = "x-tokenline-hint"
_PLACES = ("", "/v1", "/api", "/api/v1", "/openai/v1", "/api/openai/v1")
"""Where APIs are found below a server's root."""


class Listing(msgspec.Struct):
    """What the list of models told."""

    base_url: str
    """Where the API is, so far as is known; empty: nothing more can be asked."""
    models: list[str] | None = None
    """None: there is no list."""
    is_let_in: bool = True
    is_known: bool = True
    """The API answered; else only a question to a model can tell."""
    reply: Reply | None = None
    found: list[Finding] = []


async def look(asker: Asker, base_url: str) -> Listing:
    """Asks for the list of models; where that isn't found, looks for the place where it is."""
    listing = Listing(base_url, found=[])
    reply = listing.reply = await asker.get(asker.url_of(base_url, "/models"))
    if asker.proxy is not None and not _is_api(reply) and await _is_better_without(asker, reply):
        listing = await look(asker, base_url)
        seen = f"{reply.status} {reply.title}".strip() if reply.status else reply.said
        listing.found.insert(0, fail("proxy", "proxy_spoils", seen=asker.shown(seen)))
        return listing
    if reply.broken:
        return await _broken(asker, listing, reply)
    if 300 <= reply.status < 400:
        return await _redirected(asker, listing, reply)
    if _is_api(reply):
        _take(listing, reply, asker)
        return listing
    if reply.status >= 500:
        said = asker.shown(reply.title or str(reply.error.get("message") or "") or "-")
        listing.base_url = ""
        listing.found.append(
            fail("path", "path_server_error", status=reply.status, said=said, server=reply.server or "-")
        )
        return listing
    return await _search(asker, listing, reply)


def models_in(reply: Reply) -> list[str] | None:
    """The ids of a list of models, None where the answer is no such list."""
    data: Any = reply.json.get("data")
    if reply.status != 200 or not isinstance(data, list):
        return None
    return [str(model["id"]) for model in data if isinstance(model, dict) and "id" in model]


def refusal_of(reply: Reply, asker: Asker) -> Finding | None:
    """What 401, 403 and 429 mean; None for other answers."""
    said = asker.shown(str(reply.error.get("message") or "")) or f"{reply.status}"
    if reply.status == 401:
        return fail("auth", "auth_refused", said=said, error=reply.code)
    if reply.status == 403:
        return fail("auth", "auth_forbidden", said=said, error=reply.code)
    if reply.status == 429:
        return fail("auth", "auth_limited", said=said, wait=reply.headers.get("retry-after", "?"))
    return None


def _is_api(reply: Reply) -> bool:
    """It speaks the API at this path: lists models, or refuses in JSON for a reason that is not the path."""
    if models_in(reply) is not None:
        return True
    return reply.is_json and (reply.status in (401, 403, 429) or reply.status >= 500) and bool(reply.error)


def _take(listing: Listing, reply: Reply, asker: Asker) -> None:
    hint = reply.headers.get(HINT, "").removeprefix("base_url=")
    if hint and not any(finding.check == "path" for finding in listing.found):
        listing.found.append(warn("path", "path_tolerated", right=_right(hint, listing.base_url)))
    elif not listing.found:
        listing.found.append(ok("path", "path_answers", url=asker.shown(reply.url)))
    listing.models = models_in(reply)
    if listing.models is not None:
        listing.found.append(ok("auth", "auth_accepted"))
        return
    listing.is_let_in = False
    said = asker.shown(str(reply.error.get("message") or ""))
    listing.found.append(refusal_of(reply, asker) or fail("auth", "server_failed", status=reply.status, said=said))


async def _broken(asker: Asker, listing: Listing, reply: Reply) -> Listing:
    base_url = listing.base_url
    if base_url.startswith("http:") and asker.proxy is None and await speaks_tls(base_url):
        listing.found.append(fail("tls", "tls_expected", right=f"https{base_url.removeprefix('http')}"))
        again = await look(asker, f"https{base_url.removeprefix('http')}")
        if again.reply is not None and again.reply.broken:
            again.base_url = ""
        again.found = [*listing.found, *(finding for finding in again.found if finding.code != "path_broken")]
        return again
    listing.base_url = ""
    listing.found.append(fail("path", "path_broken", url=asker.shown(reply.url), said=reply.said))
    return listing


async def _redirected(asker: Asker, listing: Listing, reply: Reply) -> Listing:
    """A redirect turns a POST into a GET, or is not followed at all: base_url must be where it leads."""
    target = reply.headers.get("location", "")
    right = target.split("?")[0].removesuffix("/models").removesuffix("/") if "/models" in target else target
    if asker.surface == "anthropic":
        right = right.removesuffix("/v1")
    old, new = urlsplit(listing.base_url), urlsplit(right)
    is_same_host = not new.netloc or new.hostname == old.hostname
    if target and not new.netloc:
        right = origin_of(listing.base_url) + right
    listing.found.append(
        fail("path", "path_redirects", status=reply.status, target=asker.shown(target), right=asker.shown(right))
    )
    if not target or not is_same_host or right == listing.base_url:
        listing.base_url = ""
        return listing
    reply = await asker.get(asker.url_of(right, "/models"))
    listing.base_url = right if _is_api(reply) else ""
    if listing.base_url:
        listing.reply = reply
        _take(listing, reply, asker)
    return listing


async def _search(asker: Asker, listing: Listing, reply: Reply) -> Listing:
    """Nothing that is an API answers there: another place, another port, or nothing of the kind."""
    given = listing.base_url
    hint = reply.headers.get(HINT, "").removeprefix("base_url=")
    for place in _places(given, urlsplit(hint).path if hint else None, asker):
        other = await asker.get(asker.url_of(place, "/models"))
        if _is_api(other):
            code = "path_too_short" if len(place) > len(given) else "path_too_long"
            listing.found.append(fail("path", code, given=given, right=_right(hint, place)))
            listing.base_url, listing.reply = place, other
            _take(listing, other, asker)
            return listing
    if (listener := await _listener(asker, given, reply)) is not None:
        listing.base_url = ""
        listing.found.append(listener)
    elif reply.is_html:
        listing.base_url = ""
        listing.found.append(fail("path", "path_html", status=reply.status, title=asker.shown(reply.title) or "-"))
    elif (refused := refusal_of(reply, asker)) is not None:
        listing.is_let_in = False
        listing.found.append(refused)
    else:
        listing.is_known = False
        said = asker.shown(reply.body[:400].decode("utf-8", "replace"))
        listing.found.append(skip("path", "path_no_list", status=reply.status, said=said))
    return listing


def _right(hint: str, place: str) -> str:
    """The base_url to set: what the gateway advertises, unless a proxy stands before it and that is its own address."""
    return hint if hint and urlsplit(hint).netloc == urlsplit(place).netloc else place


def _places(given: str, hinted: str | None, asker: Asker) -> list[str]:
    """Other base_urls of the same server, the likeliest first."""
    origin = origin_of(given)
    path = urlsplit(given).path
    candidates = [] if hinted is None else [origin + hinted.rstrip("/")]
    candidates += [f"{given}{place}" for place in ("/v1", "/api")]
    while path:
        path = path.rpartition("/")[0]
        candidates.append(origin + path)
    candidates += [origin + place for place in _PLACES]
    if asker.surface == "anthropic":
        candidates = [candidate.removesuffix("/v1") for candidate in candidates]
    return [candidate for candidate in dict.fromkeys(candidates) if candidate != given]


async def _listener(asker: Asker, given: str, reply: Reply) -> Finding | None:
    """Tokenline's other ports say what they are; the key isn't shown to them."""
    told = str(reply.error.get("message") or "")
    if "spans are taken by POST" in told:
        return fail("path", "path_otlp_port", url=origin_of(given))
    if "the admin API is under" in told:
        return fail("path", "path_ops_port", url=origin_of(given))
    page = await asker.get(origin_of(given) + "/metrics", with_key=False)
    if page.status == 200 and b"\n# TYPE " in page.body[:4096]:
        is_ours = b"tokenline_" in page.body
        return fail("path", "path_ops_port" if is_ours else "path_metrics_port", url=origin_of(given))
    return None


async def _is_better_without(asker: Asker, reply: Reply) -> bool:
    """Whether the proxy is what spoils the answer: straight on there is an API. The asker then stays straight."""
    proxy, asker.proxy = asker.proxy, None
    straight = await asker.get(reply.url)
    if _is_api(straight):
        return True
    asker.proxy = proxy
    return False
