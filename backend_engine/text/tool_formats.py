"""Which form a model writes tool calls in, as its chat template shows."""

from __future__ import annotations

HERMES = "hermes"
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one for each call: Hermes, Qwen and others."""
LLAMA3 = "llama3"
"""`{"name": ..., "parameters": {...}}` as the whole answer: Llama 3.1 and later."""


def format_of_template(template: str) -> str | None:
    """None for a template that does not look at tools, or whose form is not known here."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if '"parameters"' in template and ("ipython" in template or "<|python_tag|>" in template):
        return LLAMA3
    return None
