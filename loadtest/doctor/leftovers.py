"""Variables of the environment that contradict one another, or what the doctor was asked to look at."""

from __future__ import annotations

from loadtest.doctor.finding import Finding, fail, ok, warn
from loadtest.doctor.given import BASE_URL_VARIABLES, KEY_VARIABLES, Given, masked
from loadtest.endpoint import fingerprint


def check_credentials(given: Given) -> list[Finding]:
    """Two credentials at once, and settings that apps will read in place of the given ones."""
    found = [*_anthropic_pair(given), *_other_keys(given), *_other_urls(given)]
    return found or [ok("credentials", "credentials_agree")]


def _anthropic_pair(given: Given) -> list[Finding]:
    key = given.environ.get("ANTHROPIC_API_KEY", "").strip()
    token = given.environ.get("ANTHROPIC_AUTH_TOKEN", "").strip()
    if not key or not token or key == token:
        return []
    judged = fail if given.surface == "anthropic" else warn
    return [
        judged("credentials", "two_credentials", key=fingerprint(key) or "", token=fingerprint(token) or ""),
    ]


def _other_keys(given: Given) -> list[Finding]:
    """The variable that an SDK reads by itself holds another key than the one that is looked at."""
    key = given.key.strip()
    read_by_sdk = [name for name in KEY_VARIABLES[given.surface] if name != "TOKENLINE_API_KEY"]
    if not key or given.key_from in read_by_sdk:
        return []
    return [
        warn("credentials", "other_key", name=name, other=fingerprint(other) or "", chosen=given.key_from)
        for name in read_by_sdk
        if (other := given.environ.get(name, "").strip()) and other != key
    ]


def _other_urls(given: Given) -> list[Finding]:
    """The variable that an SDK reads by itself leads elsewhere."""
    url = given.base_url.strip().rstrip("/")
    return [
        warn("credentials", "other_base_url", name=name, other=masked(other), chosen=given.base_url_from or "default")
        for name in BASE_URL_VARIABLES[given.surface]
        if name != given.base_url_from and (other := given.environ.get(name, "").strip()) and other.rstrip("/") != url
    ]
