"""The base_url as text: what is wrong with it before anybody is asked, and what it should be."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit, urlunsplit

from loadtest.doctor.finding import Finding, fail, ok, warn
from loadtest.doctor.given import Surface, masked

ENDINGS = (
    "/chat/completions", "/completions", "/responses", "/messages/count_tokens", "/messages", "/embeddings", "/models",
    "/tokenize", "/detokenize",
)  # fmt: skip
"""What clients append themselves."""
LISTEN_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - recognised, not bound
QUOTES = "\"'`“”‘’"
INVISIBLE = "\ufeff\u200b\u200c\u200d\u2060\u00ad"
"""Byte order mark, zero-width characters, soft hyphen: copied along from pages and files."""
UNEXPANDED = re.compile(r"\$\{?[A-Za-z_]\w*\}?|%[A-Za-z_]\w*%")
_REPEATED = re.compile(r"((?:/[^/]+)+?)\1+(?=/|$)")


def read_base_url(text: str, surface: Surface) -> tuple[str, list[Finding]]:
    """The base_url with its slips repaired ("" where that can't be done), and what was found."""
    found: list[Finding] = []
    url = _without_strays(text, found)
    if not url:
        return "", [fail("base_url", "url_empty")]
    if UNEXPANDED.search(url):
        return "", [*found, fail("base_url", "url_unexpanded", url=masked(url))]
    parts = _parts_of(url, found)
    if parts is None:
        return "", found
    path = _path_of(parts.path, surface, found)
    repaired = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
    return repaired, found or [ok("base_url", "url_well_formed", url=repaired)]


def _without_strays(text: str, found: list[Finding]) -> str:
    url = text.strip().strip(INVISIBLE).strip()
    if url != text and url:
        found.append(fail("base_url", "url_white_space", what=stray_in(text)))
    bare = url.strip(QUOTES).strip()
    if bare != url and bare:
        found.append(fail("base_url", "url_quoted", url=masked(bare)))
    if re.search(r"\s", bare):
        bare = re.sub(r"\s+", "", bare)
        found.append(fail("base_url", "url_white_space", what="space"))
    return bare


def _parts_of(url: str, found: list[Finding]) -> SplitResult | None:
    """Scheme, host and port; None where they can't be told."""
    if "://" not in url:
        slip = re.match(r"(https?)[:;/]+", url, re.IGNORECASE)
        scheme = slip[1].lower() if slip else "https" if re.match(r"[^/]*:443(/|$)", url) else "http"
        url = f"{scheme}://{url[slip.end() :] if slip else url}"
        found.append(fail("base_url", "url_no_scheme", right=masked(url)))
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        found.append(fail("base_url", "url_bad_host", url=masked(url)))
        return None
    if parts.scheme not in ("http", "https"):
        found.append(fail("base_url", "url_bad_scheme", url=masked(url)))
        return None
    if not host:
        found.append(fail("base_url", "url_bad_host", url=masked(url)))
        return None
    if parts.username is not None or parts.password is not None:
        found.append(fail("base_url", "url_has_credentials"))
    if parts.query or parts.fragment:
        found.append(fail("base_url", "url_has_query", url=masked(url.split("?")[0].split("#")[0])))
    if host in LISTEN_ADDRESSES:
        found.append(warn("base_url", "url_listen_address", host=host, right=LISTEN_ADDRESSES[host]))
        host = LISTEN_ADDRESSES[host]
    netloc = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    return parts._replace(netloc=netloc)


def _path_of(path: str, surface: Surface, found: list[Finding]) -> str:
    """The part of the path that belongs into a base_url."""
    if path.endswith("/"):
        if path != "/":
            found.append(warn("base_url", "url_trailing_slash", path=path))
        path = path.rstrip("/")
    if "//" in path:
        path = re.sub("/{2,}", "/", path)
        found.append(fail("base_url", "url_double_slash", right=path))
    short = path
    while ending := next((end for end in ENDINGS if short.endswith(end)), None):
        short = short.removesuffix(ending).rstrip("/")
    if surface == "anthropic" and short != path:
        short = short.removesuffix("/v1")
    if short != path:
        found.append(fail("base_url", "url_whole_path", ending=path[len(short) :], right=short or "/"))
    once = _REPEATED.sub(r"\1", short)
    if once != short:
        found.append(fail("base_url", "url_repeated", path=short, right=once))
    if surface == "anthropic" and once.endswith("/v1"):
        once = once.removesuffix("/v1")
        found.append(fail("base_url", "url_v1_for_anthropic", right=once or "/"))
    return once


def stray_in(text: str) -> str:
    """Which white space surrounds or breaks a text, in a word that `texts` knows."""
    if any(character in INVISIBLE for character in text):
        return "invisible"
    if "\n" in text or "\r" in text:
        return "line_end"
    return "tab" if "\t" in text else "space"
