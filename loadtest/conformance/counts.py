"""Token counts on the wire: exactly one usage event where the client asked for it, none where it did not."""

from __future__ import annotations

from loadtest.conformance.client import OPTIONAL_USAGE
from loadtest.conformance.finding import Finding, judged
from loadtest.conformance.played import Between, Played


async def usage_events(between: Between, surface: str) -> list[Finding]:
    """However the upstream reports its counts, the client gets them once and right."""
    case = f"{surface}: usage"
    found = []
    for name, usage in (
        ("sent once", "once"),
        ("doubled by the upstream", "twice"),
        ("in a chunk with choices", "with_choices"),
    ):
        found.append(_once(case, name, await between.play(surface=surface, wants_usage=True, usage=usage, tokens=7)))
    found.append(_once(case, "whole answer", await between.play(surface=surface, stream=False, tokens=7)))
    if surface not in OPTIONAL_USAGE:
        return found
    for name, usage in (("not asked for", "once"), ("not asked for, doubled by the upstream", "twice")):
        played = await between.play(surface=surface, usage=usage, tokens=4)
        seen = len(played.answer.usages)
        complete = len(played.answer.token_events) > 0
        found.append(judged(case, name, complete and seen == 0, f"{seen} usage events", "no usage event"))
    return found


def _once(case: str, name: str, played: Played) -> Finding:
    usages, script = played.answer.usages, played.script
    counts = {(usage.get("prompt_tokens"), usage.get("completion_tokens")) for usage in usages}
    right = len(usages) == 1 and counts == {(script.input_tokens, script.tokens)}
    seen = ", ".join(f"{i} in, {o} out" for i, o in counts) or "none"
    return judged(
        case, name, right, f"{len(usages)} times: {seen}", f"once: {script.input_tokens} in, {script.tokens} out"
    )
