"""A child process that never outlives its parent."""

from __future__ import annotations

import os
import select
import threading
import time


def end_with_parent(parent: int) -> None:
    """Ends this process when process `parent` is gone, whatever this one is doing then. Call it first of all, with
    `os.getppid()`."""

    def watch() -> None:
        try:
            handle = os.pidfd_open(parent)
        except (AttributeError, OSError):  # no Linux, or one older than 5.3
            while os.getppid() == parent:
                time.sleep(1)
        else:
            select.select([handle], [], [])
        os._exit(1)

    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
