"""A model is asked once, whole: does it answer, and is there something in the answer?"""

from __future__ import annotations

import difflib
from typing import Any

from loadtest.conformance.reading import reasoning_in, text_in
from loadtest.doctor.asking import Asker, Reply
from loadtest.doctor.finding import Finding, fail, ok, skip, warn
from loadtest.doctor.listing import Listing, refusal_of

PATHS = {"openai": "/chat/completions", "anthropic": "/messages"}
HELLO = "Say hello."
HELLO_TOKENS = 16
MAX_NAMES = 8


def fields_of(
    model: str, prompt: str, max_tokens: int, *, stream: bool, limit_name: str = "max_tokens"
) -> dict[str, Any]:
    """A request that both surfaces take."""
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, limit_name: max_tokens, "stream": stream}


def choose_model(asked: str, listing: Listing) -> tuple[str, list[Finding]]:
    """The model to ask ("" where it can't be told), and whether it is listed."""
    models = listing.models
    if models is None:
        if asked:
            return asked, [skip("model", "model_no_list", model=asked)]
        return "", [skip("model", "model_not_named")]
    if not asked:
        if len(models) == 1:
            return models[0], [ok("model", "model_only_one", model=models[0])]
        if not models:
            return "", [fail("model", "model_none_listed")]
        return "", [skip("model", "model_choose", count=len(models), names=_names(models))]
    if asked in models:
        return asked, [ok("model", "model_listed", model=asked)]
    near = near_names(asked, models)
    if near:
        return asked, [fail("model", "model_near", model=asked, near=_names(near))]
    if not models:
        return asked, [fail("model", "model_none_listed")]
    return asked, [fail("model", "model_not_listed", model=asked, names=_names(models))]


def near_names(asked: str, models: list[str]) -> list[str]:
    """Names that were probably meant: the same but for case, a prefix or an ending, then the most alike."""
    low = asked.strip().lower()
    same = [name for name in models if name.lower() == low or name.lower().split("/")[-1] == low.split("/")[-1]]
    within = [name for name in models if len(low) >= 3 and (low in name.lower() or name.lower() in low)]
    by_lower = {name.lower(): name for name in models}
    alike = [by_lower[name] for name in difflib.get_close_matches(low, by_lower, n=3, cutoff=0.6)]
    return list(dict.fromkeys([*same, *within, *alike]))[:3]


async def ask_whole(asker: Asker, base_url: str, model: str) -> tuple[Reply, str, list[Finding]]:
    """The answer, the name under which the limit of tokens is taken, and what was found."""
    url = asker.url_of(base_url, PATHS[asker.surface])
    limit_name = "max_tokens"
    reply = await asker.post(url, fields_of(model, HELLO, HELLO_TOKENS, stream=False))
    if reply.status == 400 and "max_completion_tokens" in reply.body.decode("utf-8", "replace"):
        # OpenAI's newer models know the limit by this name alone.
        limit_name = "max_completion_tokens"
        fields = fields_of(model, HELLO, HELLO_TOKENS, stream=False, limit_name=limit_name)
        reply = await asker.post(url, fields)
    return reply, limit_name, _judge(reply, asker, model)


def _judge(reply: Reply, asker: Asker, model: str) -> list[Finding]:
    if (failed := failure_of(reply, asker, model, "answer")) is not None:
        return [failed]
    fields = reply.json
    ms = round((reply.ended_ns - reply.sent_ns) / 1e6)
    if not fields:
        return [fail("answer", "answer_not_json", said=asker.shown(reply.body[:400].decode("utf-8", "replace")))]
    holder = "content" if asker.surface == "anthropic" else "choices"
    parts = fields.get(holder)
    if not isinstance(parts, list):
        return [fail("answer", "answer_wrong_shape", holder=holder, keys=", ".join(list(fields)[:MAX_NAMES]) or "-")]
    if not parts:
        return [fail("answer", "choices_empty", holder=holder)]
    if text_in(fields):
        return [ok("answer", "answer_came", ms=ms)]
    code = "answer_only_reasoning" if reasoning_in(fields) else "answer_without_text"
    return [ok("answer", code, ms=ms) if code == "answer_only_reasoning" else warn("answer", code, ms=ms)]


def failure_of(reply: Reply, asker: Asker, model: str, check: str) -> Finding | None:
    """Why a question to a model got no answer; None where it got one."""
    said = asker.shown(str(reply.error.get("message") or "")) or f"status {reply.status}"
    if reply.broken == "TimeoutError" or reply.broken == "ServerTimeoutError":
        return fail(check, "answer_timeout", seconds=round((reply.ended_ns - reply.sent_ns) / 1e9))
    if reply.broken:
        return fail(check, "answer_broken", said=reply.said)
    if (refused := refusal_of(reply, asker)) is not None:
        if reply.status == 403 and "model" in f"{reply.code} {said}".lower():
            return fail("model", "model_forbidden", model=model, said=said)
        return refused
    if reply.status == 404:
        about_model = "model" in f"{reply.code} {said}".lower()
        return fail("model" if about_model else "path", "model_unknown" if about_model else "path_unknown",
                    model=model, said=said, url=asker.shown(reply.url))  # fmt: skip
    if 300 <= reply.status < 400:
        return fail("path", "path_post_redirects", status=reply.status, target=reply.headers.get("location", "-"))
    if reply.is_html:
        return fail(check, "answer_html", status=reply.status, title=asker.shown(reply.title) or "-")
    if reply.status >= 500:
        return fail(check, "server_failed", status=reply.status, said=said)
    if reply.status >= 400:
        return fail(check, "answer_refused", status=reply.status, said=said)
    if reply.error and "choices" not in reply.json and reply.json.get("type") != "message":
        return fail(check, "answer_error_in_200", said=said)
    return None


def _names(models: list[str]) -> str:
    return ", ".join(models[:MAX_NAMES]) + (", …" if len(models) > MAX_NAMES else "")
