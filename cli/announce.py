"""What is shown while processes start, and what is printed when they are ready."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from cli.output import print_json, say

PLAIN_SECONDS = 5.0
"""How often a line is written where no spinner can turn."""


@dataclass(frozen=True)
class Facts:
    """What a user needs to begin."""

    base_url: str
    key: str | None
    model: str
    key_is_configured: bool = False
    """It came from the settings: its owner knows it, and it is not printed for people."""
    ops_url: str | None = None
    otlp_url: str | None = None
    admin_key_at: str = "server.admin_key"
    """The file, or the setting, that holds the key of console and admin API."""

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus scrapes."""
        return f"{self.ops_url}/metrics" if self.ops_url else None

    @property
    def console_url(self) -> str | None:
        """The pages for people; the admin key opens them."""
        return f"{self.ops_url}/console" if self.ops_url else None


@contextmanager
def waiting(names: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
    """Shows what is still waited for: a spinner on a terminal, else a line at every change and every 5 s."""
    console = Console(stderr=True, markup=False, highlight=False)
    began = time.monotonic()
    if console.is_terminal:
        with console.status(_one_line(_waited_for(names, 0))) as status:
            yield lambda pending: status.update(_one_line(_waited_for(pending, time.monotonic() - began)))
        return
    shown: tuple[str, ...] = tuple(names)
    shown_at = began
    say(_waited_for(names, 0))

    def show(pending: Sequence[str]) -> None:
        nonlocal shown, shown_at
        now = time.monotonic()
        if pending and (tuple(pending) != shown or now - shown_at >= PLAIN_SECONDS):
            shown, shown_at = tuple(pending), now
            say(_waited_for(pending, now - began))

    yield show


def _waited_for(names: Sequence[str], seconds: float) -> str:
    listed = ", ".join(f"{name} (which loads its model)" if name == "engine" else name for name in names)
    return f"{seconds:.0f} s, waiting for {listed}"


def _one_line(text: str) -> Text:
    """A spinner whose line wrapped could not be drawn over."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def announce(facts: Facts, *, as_json: bool) -> None:
    """Prints the facts on standard output."""
    if as_json:
        print_json(
            {
                "base_url": facts.base_url,
                "key": facts.key,
                "model": facts.model,
                "ops_url": facts.ops_url,
                "metrics_url": facts.metrics_url,
                "console_url": facts.console_url,
                "otlp_url": facts.otlp_url,
            }
        )
        return
    sys.stdout.write("\n".join(lines_of(facts)) + "\n")
    sys.stdout.flush()


def lines_of(facts: Facts) -> list[str]:
    """For people; the curl line stands alone and whole, so that it can be copied."""
    lines = ["", "Tokenline is ready.", "", f"  base_url  {facts.base_url}"]
    if facts.key is not None:
        lines.append(f"  key       {'the one in server.api_key' if facts.key_is_configured else facts.key}")
    lines += [f"  model     {facts.model}", "", "Ask it something:", "", curl_line(facts), ""]
    if facts.metrics_url:
        lines += [
            f"  console   {facts.console_url} (opens with the key in {facts.admin_key_at})",
            f"  metrics   {facts.metrics_url}",
            f"  spans     {facts.otlp_url} (OTLP over HTTP, from engines)",
            f"  why       {_own_command()} why ID, with the x-request-id of any answer (curl -i shows it)",
        ]
    return [*lines, "  end       Ctrl-C", ""]


def _own_command() -> str:
    """How this command is typed here: by name where the PATH has it, else by the path that it was started with."""
    return "tokenline" if shutil.which("tokenline") else os.path.relpath(sys.argv[0])


def curl_line(facts: Facts) -> str:
    """A streamed chat completion. A configured key is named by its variable, not shown."""
    key = facts.key
    if facts.key_is_configured:
        known = os.environ.get("TOKENLINE_API_KEY") == facts.key
        key = "$TOKENLINE_API_KEY" if known else "$YOUR_KEY"
    body = json.dumps(
        {
            "model": facts.model,
            "stream": True,
            "max_tokens": 64,
            "temperature": 0,
            "messages": [{"role": "user", "content": "Say hello in one sentence."}],
        }
    )
    authorization = f' -H "Authorization: Bearer {key}"' if key else ""
    quoted = body.replace("'", "'\\''")
    content_type = ' -H "Content-Type: application/json"'
    return f"curl -N {facts.base_url}/v1/chat/completions{authorization}{content_type} -d '{quoted}'"
