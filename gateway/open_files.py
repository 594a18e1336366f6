"""Open files: each request in flight needs one for its client and one for its upstream."""

from __future__ import annotations

import logging
import resource

from settings.schema import ServerSettings

OTHERS = 200
"""The listener, connections at rest, the store, logs."""

log = logging.getLogger("tokenline.gateway")


def allow_open_files(server: ServerSettings) -> None:
    """Raises this process's limit as far as the system lets it; says so where that is too little for its requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # macOS names a hard limit that it does not grant
            log.info("the limit of open files stays at %d", soft)
    requests = -(-server.max_concurrent_requests // server.workers)
    needed = 2 * requests + OTHERS
    if soft != resource.RLIM_INFINITY and soft < needed:
        log.warning(
            "%d open files are allowed (ulimit -n), and %d requests in flight (server.max_concurrent_requests by "
            "server.workers) need %d: beyond that, connections will be refused. Raise the limit (LimitNOFILE= in a "
            "unit), or lower the setting",
            soft,
            requests,
            needed,
        )
