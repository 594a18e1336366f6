"""Proxies that the environment puts between a client and its base_url."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping
from fnmatch import fnmatch
from urllib.parse import urlsplit

import msgspec

from loadtest.doctor.finding import Finding, fail, ok, warn
from loadtest.doctor.given import masked

CONNECT_SECONDS = 3.0
DEFAULT_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080, "socks4": 1080}
LOCAL_SUFFIXES = (".local", ".internal", ".lan", ".localhost")


class Proxy(msgspec.Struct, frozen=True):
    """One variable and what it names."""

    variable: str
    url: str
    """With its credentials, where it has any: never shown."""
    host: str
    port: int
    scheme: str

    @property
    def shown(self) -> str:
        return masked(self.url)


def proxies_of(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Scheme (http, https, all, no) -> (variable, its value); lower case wins, as with curl and Python."""
    found = {}
    for scheme in ("http", "https", "all", "no"):
        for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY"):
            if value := environ.get(name, "").strip():
                found[scheme] = (name, value)
                break
    return found


def is_bypassed(host: str, port: int, variables: Mapping[str, tuple[str, str]]) -> bool:
    """Whether NO_PROXY names the host: itself, a domain above it, everything. Most clients know no networks there."""
    listed = [entry.strip().lower().lstrip(".").strip("[]") for entry in variables.get("no", ("", ""))[1].split(",")]
    names = (host.lower(), f"{host.lower()}:{port}")
    return "*" in listed or any(
        name == entry or name.endswith(f".{entry}") for entry in listed if entry for name in names
    )


def is_local(host: str) -> bool:
    """A machine that no outside proxy could reach: loopback, private addresses, names without a public domain."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith(LOCAL_SUFFIXES)


async def check_proxy(base_url: str, environ: Mapping[str, str]) -> tuple[str | None, list[Finding]]:
    """The proxy to go through (with credentials), None for straight; and what was found."""
    variables = proxies_of(environ)
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    named = variables.get(parts.scheme) or variables.get("all")
    if named is None:
        return None, [ok("proxy", "proxy_none")]
    found = _contradictions(environ)
    if not is_bypassed(host, port, variables):
        found += _unread_exceptions(host, variables)
    proxy, more = await _judge(named, host, port, variables)
    return proxy, found + more


async def _judge(
    named: tuple[str, str], host: str, port: int, variables: Mapping[str, tuple[str, str]]
) -> tuple[str | None, list[Finding]]:
    proxy = read_proxy(*named)
    exempt = ",".join(dict.fromkeys(("127.0.0.1", "localhost", host)))
    if is_bypassed(host, port, variables):
        return None, [await _bypassed(proxy, named, variables["no"][0], host)]
    if proxy is None:
        return None, [fail("proxy", "proxy_bad_url", variable=named[0], url=masked(named[1]), host=host)]
    if not await answers(proxy.host, proxy.port):
        return None, [
            fail("proxy", "proxy_refused", variable=proxy.variable, proxy=proxy.shown, host=host, exempt=exempt)
        ]
    if proxy.scheme.startswith("socks"):
        judged = fail if is_local(host) else warn
        return None, [
            judged("proxy", "proxy_socks", variable=proxy.variable, proxy=proxy.shown, host=host, exempt=exempt)
        ]
    if is_local(host):
        return proxy.url, [
            warn("proxy", "proxy_for_local", variable=proxy.variable, proxy=proxy.shown, host=host, exempt=exempt)
        ]
    return proxy.url, [ok("proxy", "proxy_used", variable=proxy.variable, proxy=proxy.shown)]


def _contradictions(environ: Mapping[str, str]) -> list[Finding]:
    """Clients differ in which case they read."""
    return [
        warn("proxy", "proxy_two_values", lower=f"{scheme}_proxy", upper=f"{scheme.upper()}_PROXY")
        for scheme in ("http", "https", "all", "no")
        if (lower := environ.get(f"{scheme}_proxy", "").strip())
        and (upper := environ.get(f"{scheme.upper()}_PROXY", "").strip())
        and lower != upper
    ]


def _unread_exceptions(host: str, variables: Mapping[str, tuple[str, str]]) -> list[Finding]:
    """Entries of NO_PROXY that mean the host to some clients (networks, wildcards) and nothing to others."""
    variable, listed = variables.get("no", ("", ""))
    entries = [entry.strip() for entry in listed.split(",") if entry.strip()]
    meant = next((entry for entry in entries if _would_cover(entry, host)), None)
    return [] if meant is None else [warn("proxy", "no_proxy_unread", variable=variable, entry=meant, host=host)]


def _would_cover(entry: str, host: str) -> bool:
    if "*" in entry and fnmatch(host, entry):
        return True
    if "://" in entry:
        return urlsplit(entry).hostname == host
    try:
        return "/" in entry and ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def read_proxy(variable: str, value: str) -> Proxy | None:
    """What a proxy variable names; None where no client could make sense of it."""
    url = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or parts.scheme not in DEFAULT_PORTS:
        return None
    return Proxy(variable, url, host, port or DEFAULT_PORTS[parts.scheme], parts.scheme)


async def answers(host: str, port: int) -> bool:
    """Whether anything takes connections there."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _bypassed(proxy: Proxy | None, named: tuple[str, str], no_proxy: str, host: str) -> Finding:
    if proxy is not None and await answers(proxy.host, proxy.port):
        return ok("proxy", "proxy_bypassed", variable=proxy.variable, no_proxy=no_proxy, host=host)
    return warn("proxy", "proxy_dead_unused", variable=named[0], proxy=masked(named[1]), no_proxy=no_proxy, host=host)
