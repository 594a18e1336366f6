"""Asking a running gateway: the admin API of its ops listener."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from cli.bootstrap import admin_key_file, read_key_file
from cli.errors import CliError, Exit
from settings.checks import is_loopback
from settings.errors import SettingsError
from settings.loader import Loaded, load_settings

API = "/admin/v1"
TIMEOUT_SECONDS = 10.0


class OpsClient:
    """One ops listener and the admin key for it. Errors come as CliError in plain words."""

    def __init__(self, url: str, admin_key: str, *, key_from: str) -> None:
        self.url = _base_of(url)
        self.admin_key = admin_key
        self._key_from = key_from
        # Proxy variables are for the way out; a proxy can't reach our own loopback.
        outside = not is_loopback(urlsplit(self.url).hostname)
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {admin_key}"}, timeout=TIMEOUT_SECONDS, trust_env=outside
        )

    def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The JSON object that the admin API answers. A 404 is CliError with NOT_FOUND."""
        try:
            answer = self._http.request(method, f"{self.url}{API}{path}", **options)
        except httpx.HTTPError as error:
            raise CliError(
                f"the ops listener at {self.url} can't be reached ({error}). Is `tokenline up` running? "
                "Another address: --ops-url or TOKENLINE_OPS_URL",
                Exit.UNREACHABLE,
            ) from None
        if answer.status_code in (401, 403):
            raise CliError(
                f"the ops listener at {self.url} refused the admin key from {self._key_from}; "
                "set TOKENLINE_ADMIN_KEY to the key of that gateway, or TOKENLINE_STATE_DIR to its state folder"
            )
        if answer.status_code >= 400:
            code = Exit.NOT_FOUND if answer.status_code == 404 else Exit.FAILURE
            raise CliError(_message_of(answer), code)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CliError(f"{self.url} does not answer like Tokenline's ops listener; check the address")
        return found


def ops_client(ops_url: str | None, config: Path | None, environ: Mapping[str, str] = os.environ) -> OpsClient:
    """The listener asked for, else the configured one; the key from TOKENLINE_ADMIN_KEY, settings or state folder."""
    if ops_url:
        _base_of(ops_url)
    key = environ.get("TOKENLINE_ADMIN_KEY")
    if ops_url and key:
        return OpsClient(ops_url, key, key_from="TOKENLINE_ADMIN_KEY")
    settings = load_for_asking(config, environ).settings
    url = ops_url or _ops_url_of(settings.server.ops_host, settings.server.ops_port)
    if key:
        return OpsClient(url, key, key_from="TOKENLINE_ADMIN_KEY")
    if settings.server.admin_key is not None:
        return OpsClient(url, settings.server.admin_key.get_secret_value(), key_from="server.admin_key")
    file = admin_key_file(settings)
    kept = read_key_file(file)
    if kept is None:
        raise CliError(
            f"no admin key: there is none in {file} (the first `tokenline up` makes it). "
            "Set TOKENLINE_ADMIN_KEY, or TOKENLINE_STATE_DIR to the state folder of the running gateway",
            Exit.USAGE,
        )
    return OpsClient(url, kept, key_from=str(file))


def configured_ops_url(environ: Mapping[str, str] = os.environ) -> str | None:
    """The listener of the configuration; None where that can't be read."""
    try:
        server = load_for_asking(None, environ).settings.server
    except SettingsError:
        return None
    return _ops_url_of(server.ops_host, server.ops_port)


def load_for_asking(config: Path | None, environ: Mapping[str, str] = os.environ) -> Loaded:
    """Settings for a verb that only asks: the tenant key is not needed, so its variable need not be set."""
    return load_settings(config, environ, without=(("server", "api_key"),))


def _ops_url_of(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  listened on, asked by loopback
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _base_of(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix(API)
    if not base.startswith(("http://", "https://")):
        raise CliError(f"--ops-url {url!r}: must begin with http:// or https://", Exit.USAGE)
    return base


def _message_of(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else None
    return str(message) if message else f"{answer.request.url} answered with status {answer.status_code}"
