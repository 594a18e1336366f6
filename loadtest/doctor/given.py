"""What a client is set up with: base_url, key and model, from options or from the variables that SDKs read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

import msgspec

Surface = Literal["openai", "anthropic"]

DEFAULT_BASE_URL = "http://127.0.0.1:8080/api"
BASE_URL_VARIABLES: dict[Surface, tuple[str, ...]] = {
    "openai": ("OPENAI_BASE_URL", "OPENAI_API_BASE"),
    "anthropic": ("ANTHROPIC_BASE_URL",),
}
KEY_VARIABLES: dict[Surface, tuple[str, ...]] = {
    "openai": ("OPENAI_API_KEY", "TOKENLINE_API_KEY"),
    "anthropic": ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY", "TOKENLINE_API_KEY"),
}
MODEL_VARIABLES: dict[Surface, tuple[str, ...]] = {"openai": (), "anthropic": ("ANTHROPIC_MODEL",)}
BEARER_VARIABLES = ("ANTHROPIC_AUTH_TOKEN",)
"""What Anthropic's clients send as Authorization; they send other keys as x-api-key."""

_KEY_LIKE = re.compile(r"sk-[A-Za-z0-9_-]{6,}")
_USERINFO = re.compile(r"(?<=://)[^/@\s]*@")


class Given(msgspec.Struct, frozen=True):
    """The settings of one client. Of base_url and key: where each came from."""

    surface: Surface
    base_url: str
    base_url_from: str
    key: str
    """As it was found, white space and all; empty where there is none."""
    key_from: str
    wants_key: bool
    """False: the endpoint takes none."""
    model: str
    environ: Mapping[str, str]

    @property
    def key_as_bearer(self) -> bool:
        """Which header the client sends the key in."""
        return self.surface == "openai" or self.key_from in BEARER_VARIABLES


def given_by(
    surface: Surface,
    base_url: str | None,
    key_env: str | None,
    model: str | None,
    environ: Mapping[str, str],
    *,
    no_key: bool = False,
) -> Given:
    """Options first, then the variables of the surface's SDK, then Tokenline's defaults."""
    url_from = "--base-url" if base_url is not None else _first_set(BASE_URL_VARIABLES[surface], environ)
    url = base_url if base_url is not None else environ.get(url_from, DEFAULT_BASE_URL)
    key_from = "" if no_key else key_env or _first_set(KEY_VARIABLES[surface], environ)
    named = model or environ.get(_first_set(MODEL_VARIABLES[surface], environ), "")
    return Given(surface, url, url_from, environ.get(key_from, ""), key_from, not no_key, named.strip(), environ)


def masked(text: str, key: str = "") -> str:
    """The text without the key, without anything that looks like one, and without credentials in URLs."""
    if len(key.strip()) >= 3:
        text = text.replace(key, "…").replace(key.strip(), "…")
    return _USERINFO.sub("…@", _KEY_LIKE.sub("sk-…", text))


def origin_of(base_url: str) -> str:
    """Scheme, host and port."""
    parts = urlsplit(base_url)
    return f"{parts.scheme}://{parts.netloc}"


def _first_set(names: tuple[str, ...], environ: Mapping[str, str]) -> str:
    return next((name for name in names if environ.get(name, "").strip()), "")
