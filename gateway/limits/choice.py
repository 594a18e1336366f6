"""Which limiter the settings ask for."""

from __future__ import annotations

import logging

from gateway.keys.plans import Plans
from gateway.keys.stores import require_redis
from gateway.limits.board import Board
from gateway.limits.budgets import Budgets
from gateway.limits.grant import Limiter
from gateway.limits.local import LocalLimits
from settings import Settings
from tracing.clock import Clock

log = logging.getLogger("tokenline.limits")


def limiter_from(settings: Settings, clock: Clock, plans: Plans, worker: int) -> Limiter:
    """Limits of this machine's workers together, or shared through redis.url. Raises SettingsError without the package
    redis."""
    has_siblings = settings.server.workers > 1
    board = _board(settings, worker) if has_siblings else None
    budgets = Budgets(settings.budgets_path, clock, settings.keys.flush_seconds, is_shared=has_siblings)
    local = LocalLimits(plans, clock, budgets, board, degraded=has_siblings and board is None)
    redis = settings.redis
    if redis.url is None:
        return local
    require_redis()
    from gateway.limits.link import Link
    from gateway.limits.shared import SharedLimits

    link = Link(redis.url.get_secret_value(), redis.timeout_ms / 1e3, redis.prefix)
    return SharedLimits(plans, clock, link, local, prefix=redis.prefix, on_outage=redis.on_outage)


def _board(settings: Settings, worker: int) -> Board | None:
    try:
        return Board(settings.limits_path, worker, settings.server.workers)
    except OSError as error:
        log.warning(
            "the counters that workers share can't be kept in %s (%s): each of the %d workers limits keys by itself",
            settings.limits_path,
            error,
            settings.server.workers,
        )
        return None
