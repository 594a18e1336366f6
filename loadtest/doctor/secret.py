"""The key as text: what copying, quoting and files add to it."""

from __future__ import annotations

import re

from loadtest.doctor.address import INVISIBLE, QUOTES, UNEXPANDED, stray_in
from loadtest.doctor.finding import Finding, fail, ok, skip
from loadtest.doctor.given import Given
from loadtest.endpoint import fingerprint

_PLACEHOLDER = re.compile(
    r"(?i)(your|my|the)[-_ ].*key|<.*>|\[.*\]|sk-(tl-)?(…|\.\.\.|x{3,}).*|.*(…|\.\.\.)|changeme|replace.?me|api[-_]?key"
)
_SCHEME = re.compile(r"(?i)bearer\s+|(authorization|x-api-key)\s*:\s*(bearer\s+)?")


def read_key(given: Given) -> tuple[str, list[Finding]]:
    """The key with its slips repaired ("" where there is none), and what was found; never the key in the findings."""
    if not given.wants_key:
        return "", [skip("key", "key_not_wanted")]
    if not given.key.strip().strip(INVISIBLE):
        if not given.key_from:
            return "", [fail("key", "key_none", names=_names(given))]
        return "", [fail("key", "key_empty", name=given.key_from)]
    found: list[Finding] = []
    name = given.key_from
    unquoted = given.key.strip().strip(INVISIBLE).strip().strip(QUOTES)
    bare = unquoted.strip().strip(INVISIBLE).strip()
    outside = given.key.partition(bare)
    if strays := re.sub(rf"[{QUOTES}]", "", outside[0] + outside[2]):
        found.append(fail("key", "key_white_space", name=name, what=stray_in(strays)))
    if re.search(rf"[{QUOTES}]", outside[0] + outside[2]):
        found.append(fail("key", "key_quoted", name=name))
    if scheme := _SCHEME.match(bare):
        bare = bare[scheme.end() :]
        found.append(fail("key", "key_has_scheme", name=name))
    if UNEXPANDED.fullmatch(bare):
        return "", [*found, fail("key", "key_unexpanded", name=name, variable=bare)]
    if _PLACEHOLDER.fullmatch(bare):
        return "", [*found, fail("key", "key_placeholder", name=name)]
    if inside := re.search(rf"[\s{INVISIBLE}]|\\n", bare):
        bare = re.sub(rf"[\s{INVISIBLE}]|\\n", "", bare)
        found.append(fail("key", "key_space_inside", name=name, what=stray_in(inside[0].replace("\\n", "\n"))))
    if not bare.isascii() or not bare.isprintable():
        return "", [*found, fail("key", "key_not_ascii", name=name)]
    return bare, found or [ok("key", "key_well_formed", name=name, fingerprint=fingerprint(bare) or "")]


def _names(given: Given) -> str:
    return "ANTHROPIC_AUTH_TOKEN" if given.surface == "anthropic" else "OPENAI_API_KEY"
