"""What keys and teams have used: the admin API's and the command line's one answer."""

from __future__ import annotations

from typing import Any

from settings import Settings
from tracing.observer.usage import SLOT_NS, read_usage
from tracing.observer.windows import window_ns

USAGE_BY = {"key": ("key_alias", "team"), "team": ("team",), "model": ("key_alias", "team", "model")}


def usage_of(settings: Settings, window: str, by: str, now_ns: int) -> dict[str, Any]:
    """Requests and tokens of the window by key, team or model; it begins at a whole ten minutes.

    Raises ValueError for a window that is none, sqlite3.Error when the file can't be read.
    """
    since_ns = now_ns - window_ns(window)
    rows = read_usage(settings.usage_path, since_ns, USAGE_BY[by])
    return {"window": window, "by": by, "since_ns": since_ns // SLOT_NS * SLOT_NS, "usage": rows}
