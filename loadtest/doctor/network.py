"""The way to the endpoint: name, connection, TLS, each on its own."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

from loadtest.doctor.finding import Finding, fail, ok, skip, warn
from loadtest.doctor.proxies import DEFAULT_PORTS
from tracing.clock import Clock

CONNECT_SECONDS = 5.0
_VERIFY_CODES = {
    9: "tls_not_yet_valid", 10: "tls_expired", 18: "tls_self_signed", 19: "tls_self_signed", 20: "tls_unknown_issuer",
    21: "tls_unknown_issuer", 62: "tls_wrong_host", 64: "tls_wrong_host",
}  # fmt: skip
"""OpenSSL's X509_V_ERR_* -> diagnosis."""
_PLAIN_SERVER = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE", "PACKET_LENGTH")
"""What OpenSSL says of a peer that does not speak TLS."""


async def reach(base_url: str, clock: Clock) -> tuple[str, list[Finding]]:
    """The base_url that can be reached ("" where none can), and what was found on the way."""
    parts = urlsplit(base_url)
    host, port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
    addresses, finding = await _resolve(host, port)
    found = [finding]
    if not addresses:
        return "", found
    connection = await _connect(host, port, addresses, clock)
    found.append(connection)
    if connection.result == "fail":
        return "", found
    if parts.scheme == "http":
        found.append(warn("tls", "tls_none_public", host=host) if _are_public(addresses) else skip("tls", "tls_none"))
        return base_url, found
    finding = await _shake_hands(host, port)
    found.append(finding)
    if finding.code == "tls_plain_server":
        # A key that was meant to be encrypted never goes out in the clear to a public address.
        return ("" if _are_public(addresses) else f"http{base_url.removeprefix('https')}"), found
    return (base_url if finding.result == "ok" else ""), found


async def speaks_tls(base_url: str) -> bool:
    """Whether a server answers a TLS handshake, whoever it says it is."""
    parts = urlsplit(base_url)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 443, ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _are_public(addresses: Sequence[str]) -> bool:
    return any(ipaddress.ip_address(address.split("%")[0]).is_global for address in addresses)


async def _resolve(host: str, port: int) -> tuple[list[str], Finding]:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        return [], fail("dns", "dns_slow", host=host, seconds=CONNECT_SECONDS)
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return [], fail("dns", "dns_failed", host=host, said=said)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if addresses == [host]:
        return addresses, skip("dns", "dns_not_needed", host=host)
    return addresses, ok("dns", "dns_resolved", host=host, addresses=", ".join(addresses[:4]))


async def _connect(host: str, port: int, addresses: Sequence[str], clock: Clock) -> Finding:
    said, is_refused, is_slow = "", False, False
    for number, address in enumerate(addresses):
        began_ns = clock.mono_ns()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(address, port)
        except TimeoutError:
            is_slow = True
        except OSError as error:
            is_refused = is_refused or isinstance(error, ConnectionRefusedError)
            said = error.strerror or str(error)
        else:
            writer.close()
            ms = round((clock.mono_ns() - began_ns) / 1e6, 1)
            if number:
                return ok("connect", "connected_second", address=address, port=port, ms=ms, first=addresses[0])
            return ok("connect", "connected", address=address, port=port, ms=ms)
    if is_refused:
        return fail("connect", "connect_refused", host=host, port=port)
    if is_slow:
        return fail("connect", "connect_timeout", host=host, port=port, seconds=CONNECT_SECONDS)
    return fail("connect", "connect_failed", host=host, port=port, said=said)


async def _shake_hands(host: str, port: int) -> Finding:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port, ssl=ssl.create_default_context())
    except ssl.SSLCertVerificationError as error:
        code = _VERIFY_CODES.get(error.verify_code, "tls_not_trusted")
        return fail("tls", code, host=host, said=error.verify_message)
    except ssl.SSLError as error:
        if any(word in (error.reason or "") for word in _PLAIN_SERVER):
            return fail("tls", "tls_plain_server", host=host, port=port)
        return fail("tls", "tls_failed", host=host, said=error.reason or str(error))
    except (OSError, TimeoutError) as error:
        return fail("tls", "tls_failed", host=host, said=str(error) or "the connection was closed or nothing came")
    version = writer.get_extra_info("ssl_object").version()
    writer.close()
    return ok("tls", "tls_trusted", host=host, version=str(version))
