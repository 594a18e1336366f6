"""The client's own limit on open files: each request in flight needs one."""

from __future__ import annotations

SPARE_FILES = 128
"""Beside the connections: the interpreter's own, the archive, the metrics page."""


def raise_open_files(connections: int) -> str | None:
    """Raises the soft limit so that `connections` fit; what to tell the user where they don't, else None."""
    try:
        import resource
    except ImportError:
        return None
    wanted = connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError) as error:
        return _told(wanted, soft, f"it can't be raised: {error}")
    return None if allowed >= wanted else _told(wanted, allowed, "the hard limit allows no more")


def _told(wanted: int, limit: int, reason: str) -> str:
    return (
        f"{wanted} open files are needed and {limit} are allowed ({reason}): connections beyond fail. Ask for fewer "
        f"requests in flight, or raise the limit first: `ulimit -Hn {wanted}` as root, LimitNOFILE= of a systemd unit, "
        f"or `nofile` in /etc/security/limits.conf"
    )
