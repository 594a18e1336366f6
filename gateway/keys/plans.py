"""Plans: named sets of limits that keys may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.keys.limits import Limits
from gateway.keys.record import KeyRecord
from protocol.errors import ApiError
from settings.schema import PlanSettings, Settings


class Plans:
    """Named sets of limits."""

    def __init__(self, plans: Mapping[str, PlanSettings], default: str | None = None) -> None:
        self.replace(plans, default)

    def replace(self, plans: Mapping[str, PlanSettings], default: str | None) -> None:
        """Other plans, which hold from the next request of each key."""
        self._plans = {name: Limits(**plan.model_dump()) for name, plan in plans.items()}
        self._default = default

    def limits_of(self, key: KeyRecord) -> Limits:
        """What holds for a key: its own limits before its plan's. Raises ApiError 403 when nobody defined the plan."""
        name = key.plan or self._default
        if name is None:
            return key.limits
        plan = self._plans.get(name)
        if plan is None:
            raise ApiError(
                403,
                "plan_not_found",
                f"This key has the plan {name!r}, which is not defined at this gateway. Its operator must add "
                f"[plans.{name}] or give the key another plan.",
            )
        return key.limits.over(plan)


def check_plan(settings: Settings, plan: str | None) -> None:
    """Raises ValueError for the plan of a new key that nobody defined."""
    if plan is not None and plan not in settings.plans:
        there = f"take one of {', '.join(settings.plans)}" if settings.plans else "leave the plan out"
        raise ValueError(
            f"there is no plan {plan!r}; add a table [plans.{plan}] to the configuration, with limits such as "
            f"requests_per_minute = 60, or {there}"
        )


def shown_plans(settings: Settings) -> dict[str, Any]:
    """Every plan with what it limits, and which one keys without a plan have."""
    plans = [{"name": name, "limits": plan.model_dump(exclude_none=True)} for name, plan in settings.plans.items()]
    return {"plans": plans, "default_plan": settings.keys.default_plan}
