"""The examination: base_url and key as text, the way there, the API, the model, an answer, a stream, the clock."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from loadtest.doctor.address import read_base_url
from loadtest.doctor.answering import ask_whole, choose_model
from loadtest.doctor.asking import Asker, Reply
from loadtest.doctor.finding import CHECKS, Finding, Report, ok, skip, warn
from loadtest.doctor.given import Given, masked
from loadtest.doctor.leftovers import check_credentials
from loadtest.doctor.listing import Listing, look
from loadtest.doctor.network import reach
from loadtest.doctor.proxies import check_proxy
from loadtest.doctor.secret import read_key
from loadtest.doctor.streaming import ask_stream
from loadtest.endpoint import fingerprint
from tracing.clock import Clock

MAX_SKEW_SECONDS = 5.0
"""`Date` has whole seconds, and a request has its own time on the way."""
ID_HEADER = "x-tokenline-request-id"
_STAGE = re.compile(r"([\w-]+);dur=([0-9.]+)")

_BARRIERS = ("dns", "connect", "tls", "path", "auth", "model", "answer", "stream")
"""Checks that, where they fail, may leave nothing to go on with."""

Progress = Callable[[str], None]
"""Told the name of the check that begins."""


class _Examined(msgspec.Struct):
    """What is known so far."""

    findings: list[Finding]
    base_url: str = ""
    key: str = ""
    model: str = ""
    replies: list[Reply] = []


async def examine(given: Given, clock: Clock, *, timeout_seconds: float = 60.0, progress: Progress) -> Report:
    """Makes every check that the one before left a way to make. `timeout_seconds` bounds each request."""
    seen = _Examined([], replies=[])
    progress("base_url")
    base_url, found = read_base_url(given.base_url, given.surface)
    seen.findings += found
    seen.key, found = read_key(given)
    seen.findings += found
    seen.findings += check_credentials(given)
    if base_url:
        progress("proxy")
        proxy, found = await check_proxy(base_url, given.environ)
        seen.findings += found
        if proxy is None:
            progress("connect")
            base_url, found = await reach(base_url, clock)
            seen.findings += found
        else:
            seen.findings += [skip(check, "by_proxy") for check in ("dns", "connect", "tls")]
        if base_url:
            async with Asker(
                given.surface, seen.key, clock,
                as_bearer=given.key_as_bearer, proxy=proxy, timeout_seconds=timeout_seconds,
            ) as asker:  # fmt: skip
                await _ask(asker, base_url, given, seen, progress)
    _settle_key(given, seen)
    seen.findings += _clock(seen.replies) + _gateway(seen.replies)
    return _report(given, seen)


async def _ask(asker: Asker, base_url: str, given: Given, seen: _Examined, progress: Progress) -> None:
    progress("path")
    listing = await look(asker, base_url)
    seen.findings += listing.found
    seen.base_url = listing.base_url
    seen.replies += [listing.reply] if listing.reply is not None else []
    if not listing.base_url or not listing.is_let_in:
        return
    seen.model, found = choose_model(given.model, listing)
    seen.findings += found
    if not seen.model:
        if not listing.is_known:
            seen.findings.append(warn("path", "path_unsure", url=listing.base_url))
        return
    progress("answer")
    whole, limit_name, found = await ask_whole(asker, listing.base_url, seen.model)
    seen.replies.append(whole)
    _take_answer(seen, listing, found)
    if any(finding.result == "fail" for finding in found):
        return
    progress("stream")
    stream, found = await ask_stream(asker, listing.base_url, seen.model, limit_name)
    seen.replies.append(stream)
    seen.findings += found


def _take_answer(seen: _Examined, listing: Listing, found: list[Finding]) -> None:
    """The answer settles what the list of models had left open."""
    is_answered = all(finding.result != "fail" for finding in found)
    if is_answered and not listing.is_known:
        seen.findings += [ok("path", "path_answers_chat"), ok("auth", "auth_accepted")]
    if is_answered:
        # A name that isn't listed and works all the same is an alias.
        unlisted = warn("model", "model_unlisted_works", model=seen.model)
        _replace(seen, lambda finding: finding.check == "model" and finding.result == "fail", unlisted)
    if any(finding.check == "auth" for finding in found):
        # The list is open to everybody, the models are not.
        seen.findings = [finding for finding in seen.findings if finding.code != "auth_accepted"]
    if any(finding.check == "model" and finding.result == "fail" for finding in seen.findings):
        # The list has said so already, and had a better name.
        found = [finding for finding in found if finding.code != "model_unknown"]
    seen.findings += found


def _settle_key(given: Given, seen: _Examined) -> None:
    """Without a key: either none is needed, or its absence is the one thing to say."""
    if seen.key or not given.wants_key:
        return
    codes = {finding.code for finding in seen.findings}
    if "auth_refused" in codes:
        _replace(seen, lambda finding: finding.code == "auth_refused", skip("auth", "after", other="key"))
    elif "answer_came" in codes:
        unneeded = skip("key", "key_not_needed")
        _replace(seen, lambda finding: finding.check == "key" and finding.result == "fail", unneeded)


def _replace(seen: _Examined, fits: Callable[[Finding], bool], other: Finding) -> None:
    seen.findings = [other if fits(finding) else finding for finding in seen.findings]


def _clock(replies: list[Reply]) -> list[Finding]:
    """Which clock is right can't be told from here, only that they differ."""
    for reply in replies:
        if (date_s := reply.date_s) is not None and reply.wall_ns:
            skew_s = round(date_s + 0.5 - reply.wall_ns / 1e9, 1)
            if abs(skew_s) > MAX_SKEW_SECONDS:
                return [warn("clock", "clock_ahead" if skew_s > 0 else "clock_behind", seconds=abs(skew_s))]
            return [ok("clock", "clock_agrees")]
    return [skip("clock", "clock_unknown")] if replies else []


def _gateway(replies: list[Reply]) -> list[Finding]:
    """What a Tokenline gateway tells beside its answer."""
    reply = next((reply for reply in reversed(replies) if ID_HEADER in reply.headers), None)
    if reply is None:
        return [skip("gateway", "gateway_other")] if any(reply.status for reply in replies) else []
    stages = _STAGE.findall(reply.headers.get("server-timing", ""))
    told = ", ".join(f"{name} {float(ms):.1f}" for name, ms in stages)
    if not told:
        return [ok("gateway", "gateway_tokenline", request_id=_id_of(reply))]
    return [ok("gateway", "gateway_tokenline_timed", request_id=_id_of(reply), stages=told)]


def _report(given: Given, seen: _Examined) -> Report:
    made = {finding.check for finding in seen.findings}
    missing = [skip(check, "after", other=_reason(seen.findings, check)) for check in CHECKS if check not in made]
    order = {check: number for number, check in enumerate(CHECKS)}
    findings = sorted([*seen.findings, *missing], key=lambda finding: order[finding.check])
    reply = next((reply for reply in reversed(seen.replies) if _id_of(reply)), None)
    return Report(
        surface=given.surface,
        base_url=masked(given.base_url, seen.key),
        base_url_from=given.base_url_from or "default",
        used_base_url=seen.base_url,
        key_fingerprint=fingerprint(seen.key or None) or "",
        key_from=given.key_from,
        model=seen.model or given.model,
        request_id=_id_of(reply) if reply is not None else "",
        is_tokenline=any(ID_HEADER in reply.headers for reply in seen.replies),
        findings=[_without_key(finding, seen.key) for finding in findings],
    )


def _without_key(finding: Finding, key: str) -> Finding:
    """Whatever a server said: no key leaves the doctor."""
    values = {name: masked(value, key) if isinstance(value, str) else value for name, value in finding.values.items()}
    return msgspec.structs.replace(finding, values=values)


def _id_of(reply: Reply) -> str:
    return reply.headers.get(ID_HEADER) or reply.headers.get("x-request-id") or reply.headers.get("request-id", "")


def _reason(findings: list[Finding], check: str) -> str:
    """What left no way to make a check."""
    before = CHECKS[: CHECKS.index(check)]
    failed = [name for name in _BARRIERS if name in before and any(_bars(f) for f in findings if f.check == name)]
    return failed[-1] if failed else "base_url"


def _bars(finding: Finding) -> bool:
    return finding.result in ("warn", "fail") or finding.code in ("model_choose", "after")
