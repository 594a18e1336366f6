"""Checks across keys: what must hold for settings to make sense, and what must hold before a process starts."""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from urllib.parse import SplitResult, urlsplit

from pydantic import SecretStr

from settings.errors import SettingsError
from settings.schema import ENGINE_UPSTREAM, Settings, UpstreamSettings

_PASSWORD = re.compile(r"//.*@", re.DOTALL)
"""User name and password of a URL, however it goes on."""


def check_consistent(settings: Settings) -> None:
    """Raises SettingsError when two keys contradict each other or a value names something that doesn't exist."""
    _check_base_url(settings)
    _check_secret("server.api_key", settings.server.api_key)
    _check_secret("server.admin_key", settings.server.admin_key)
    _check_secret("server.otlp_token", settings.server.otlp_token)
    _check_unique("upstreams", (upstream.name for upstream in settings.upstreams))
    _check_unique("models", (route.name for route in settings.models))
    for number, upstream in enumerate(settings.upstreams):
        _check_upstream(f"upstreams.{number} ({upstream.name})", upstream)
    _check_targets(settings)
    _check_plans(settings)
    _check_redis(settings)
    if settings.tracing.record_content:
        raise SettingsError(
            "tracing.record_content = true: prompts and answers are never recorded in this version; set it to false"
        )


def check_startable(settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
    """Raises SettingsError when the gateway's side loads but can't be run here."""
    check_base_url_port(settings)
    _check_listeners(settings)
    _check_tls(settings)
    _check_otlp_token(settings)
    for upstream in settings.upstreams:
        if upstream.api_key_env is None:
            continue
        key = environ.get(upstream.api_key_env)
        where = f"upstream {upstream.name} takes its key from the environment variable {upstream.api_key_env}, which"
        if not key:
            raise SettingsError(f"{where} is not set")
        if not _fits_header(key):
            raise SettingsError(f"{where} holds a space, a line break or a character outside ASCII: no header takes it")


def check_answerable(settings: Settings) -> None:
    """Raises SettingsError when a gateway with these settings could answer nobody."""
    if settings.engine.backend != "none" or settings.models:
        return
    if settings.upstreams:
        raise SettingsError(
            "[[upstreams]] are set, but no model leads to them; add a table [[models]] with "
            f'name = "..." and targets = [{{ upstream = "{settings.upstreams[0].name}" }}]'
        )
    raise SettingsError(
        "there is nothing to answer requests: no engine is started and no [[upstreams]] are set; name a server under "
        "[[upstreams]] and its models under [[models]]"
    )


def check_engine_startable(settings: Settings) -> None:
    """Raises SettingsError when our own engine can't do what is asked of it."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(settings.engine, name)
        if size > 1:
            raise SettingsError(
                f"engine.{name} = {size}: Tokenline's own engine runs on one device. Set it to 1, or set "
                'engine.backend = "vllm", which spreads the model over several and is started with the same settings '
                "(docs/vllm.md); a server that runs elsewhere goes under [[upstreams]]"
            )


def is_loopback(host: str | None) -> bool:
    """Whether an address reaches this machine alone."""
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _split(key: str, url: str) -> SplitResult:
    shown = _PASSWORD.sub("//…@", url)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise SettingsError(f"{key} = {shown!r}: not a URL: {_PASSWORD.sub('//…@', str(error))}") from None
    if not url.isprintable() or " " in url:
        raise SettingsError(f"{key} = {shown!r}: must not hold a space or a line break")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"{key} = {shown!r}: must begin with http:// or https:// and name a host")
    if parts.username or parts.password:
        raise SettingsError(f"{key}: must not hold a user name or password; keys come from the environment")
    return parts


def _check_base_url(settings: Settings) -> None:
    url = settings.server.base_url
    if url is None:
        return
    parts = _split("server.base_url", url)
    if not parts.path.rstrip("/").endswith("/api") or parts.query or parts.fragment:
        right = f"{parts.scheme}://{parts.netloc}/api"
        raise SettingsError(f"server.base_url = {url!r}: must end in /api, as in {right!r}")


def check_base_url_port(settings: Settings) -> None:
    """A loopback base_url leads straight to the listener, so their ports must agree. Raises SettingsError."""
    url = settings.server.base_url
    if url is None:
        return
    parts = _split("server.base_url", url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if is_loopback(parts.hostname) and port != settings.server.port:
        raise SettingsError(
            f"server.base_url = {url!r} leads to port {port} of this machine, but server.port = "
            f"{settings.server.port} is where requests are taken; make them the same"
        )


def _check_tls(settings: Settings) -> None:
    server = settings.server
    if (server.tls_cert is None) != (server.tls_key is None):
        missing = "tls_key" if server.tls_key is None else "tls_cert"
        raise SettingsError(f"server.{missing} is missing: HTTPS needs both tls_cert and tls_key")
    for name, file in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        if file is not None and not os.access(file, os.R_OK):
            raise SettingsError(f"server.{name} = {str(file)!r}: there is no such file, or it can't be read")


def _check_listeners(settings: Settings) -> None:
    listeners = listeners_of(settings)
    for number, (key, _, port) in enumerate(listeners):
        for other_key, _, other_port in listeners[:number]:
            if port == other_port:
                raise SettingsError(f"{other_key} and {key} are both {port}; each listener needs a port of its own")


def _check_otlp_token(settings: Settings) -> None:
    server = settings.server
    if server.otlp_token is None and not is_loopback(server.otlp_host):
        raise SettingsError(
            f"server.otlp_host = {server.otlp_host!r}: whoever reaches port {server.otlp_port} could add spans to any "
            'trace. Set server.otlp_token (best as "${TOKENLINE_OTLP_TOKEN}") and give it to the engines, or take '
            "127.0.0.1"
        )


def listeners_of(settings: Settings) -> list[tuple[str, str, int]]:
    """(setting, host, port) of everything the gateway's side listens on, and vLLM's port where it has one."""
    server, engine = settings.server, settings.engine
    listeners = [
        ("server.port", server.host, server.port),
        ("server.ops_port", server.ops_host, server.ops_port),
        ("server.otlp_port", server.otlp_host, server.otlp_port),
    ]
    if engine.backend == "vllm" and engine.vllm_port is not None:
        listeners.append(("engine.vllm_port", "127.0.0.1", engine.vllm_port))
    return listeners


def _check_secret(key: str, secret: SecretStr | None) -> None:
    if secret is None:
        return
    value = secret.get_secret_value()
    if not value:
        raise SettingsError(f"{key} is empty")
    if not _fits_header(value):
        raise SettingsError(
            f"{key} holds a space, a line break or a character outside ASCII, which no client can send in a header"
        )


def _fits_header(value: str) -> bool:
    return value.isascii() and value.isprintable() and " " not in value


def _check_unique(table: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise SettingsError(f"{table}: {name!r} is there {count} times; each name must be used once")


def _check_upstream(where: str, upstream: UpstreamSettings) -> None:
    if (upstream.url is None) == (upstream.unix_socket is None):
        found = "both are given" if upstream.url else "neither is given"
        raise SettingsError(f"{where}: exactly one of url and unix_socket is needed; {found}")
    if upstream.url is not None:
        parts = _split(f"{where}: url", upstream.url)
        if parts.query or parts.fragment:
            raise SettingsError(f"{where}: url: must not hold ? or #, since paths are appended to it")
    path = upstream.health_path
    if path and (not path.startswith("/") or not _fits_header(path)):
        raise SettingsError(f"{where}: health_path = {path!r}: must begin with / and hold no space or line break")


def _check_plans(settings: Settings) -> None:
    plan = settings.keys.default_plan
    if plan is not None and plan not in settings.plans:
        there = ", ".join(settings.plans) or "none is defined"
        raise SettingsError(f"keys.default_plan = {plan!r}: there is no [plans.{plan}] ({there})")


def _check_redis(settings: Settings) -> None:
    if settings.redis.url is None:
        return
    scheme = settings.redis.url.get_secret_value().partition("://")[0]
    if scheme not in ("redis", "rediss", "unix"):
        raise SettingsError("redis.url: must begin with redis://, rediss:// (TLS) or unix://")


def _check_targets(settings: Settings) -> None:
    known = [upstream.name for upstream in settings.upstreams]
    if settings.engine.backend != "none":
        if ENGINE_UPSTREAM in known:
            raise SettingsError(
                f"upstreams: the name {ENGINE_UPSTREAM!r} is the co-located engine's; take another, or set "
                'engine.backend = "none"'
            )
        known.append(ENGINE_UPSTREAM)
    for route in settings.models:
        for target in route.targets:
            if target.upstream not in known:
                there = ", ".join(known) or "none is defined"
                raise SettingsError(
                    f"models ({route.name}): upstream {target.upstream!r} is not among [[upstreams]] ({there})"
                )
