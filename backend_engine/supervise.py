"""The core's process: its folder, its start, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from settings.schema import Settings

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5.0
TERMINATE_SECONDS = 2.0
_FOLDER = "engine-"
ALLOCATOR = {
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.arena_max=1",
            f"glibc.malloc.mmap_threshold={32 << 20}",
            f"glibc.malloc.trim_threshold={1 << 40}",
            "glibc.malloc.hugetlb=1",
        )
    )
}
"""A step on a CPU frees megabytes after each operator and asks for them again. By default glibc gives them back to the
kernel in between, which clears every page anew: 8 % of the CPU time of a prefill. So it keeps what a step once took, in
huge pages where there are any. Other allocators don't read this; who sets the variable decides."""


@contextmanager
def core_folder(run_dir: Path) -> Iterator[Path]:
    """A folder of this process alone for the core's sockets and settings; gone afterwards.

    Its name holds our process id, so that a core which outlives its frontend for a moment can never take the messages
    of the next one. Folders of frontends that were killed are swept away here.
    """
    for left_over in run_dir.glob(f"{_FOLDER}*"):
        pid = left_over.name.removeprefix(_FOLDER)
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left_over, ignore_errors=True)
    folder = run_dir / f"{_FOLDER}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def inbox_of(folder: Path) -> str:
    """Where the core reads."""
    return f"ipc://{folder / 'in'}"


def outbox_of(folder: Path) -> str:
    """Where the core writes."""
    return f"ipc://{folder / 'out'}"


class CoreProcess:
    """`python -m backend_engine.core.process`, in a session of its own: Ctrl-C reaches the frontend, which ends it in
    order; should the frontend be killed, the core sees that its parent is gone and ends itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, settings: Settings, folder: Path) -> CoreProcess:
        """Starts a core with these settings (secrets masked: it needs none)."""
        path = folder / "settings.json"
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(settings.model_dump_json())
        arguments = ("--settings", str(path), "--inbox", inbox_of(folder), "--outbox", outbox_of(folder))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "backend_engine.core.process", *arguments, stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True, env=ALLOCATOR | os.environ,
        )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Until it has ended; its exit status, negative for a signal."""
        return await self._process.wait()

    async def end(self, *, is_loading: bool = False) -> None:
        """Waits for a core that was told to shut down; then SIGTERM, then SIGKILL. One that is loading hears nothing
        before it is done, and has nothing to put in order."""
        patience = 0.0 if is_loading else SHUTDOWN_SECONDS
        for seconds, then in ((patience, self._process.terminate), (TERMINATE_SECONDS, self._process.kill)):
            if self._process.returncode is not None:
                return
            try:
                await asyncio.wait_for(self._process.wait(), seconds)
            except TimeoutError:
                if seconds:
                    log.warning("the engine's core (process %d) did not end in %.0f s", self.pid, seconds)
                then()
            else:
                return
        await self._process.wait()
