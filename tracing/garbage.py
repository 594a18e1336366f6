"""The garbage collector of a process that serves: what start-up made is left alone, the rest looked at now and then.

Almost nothing here makes cycles: records, spans and requests are freed by counting. A collection each 700 allocations,
CPython's default, would look at the same live objects again and again (a sixth of the observer's CPU time).
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""Allocations less deallocations between two looks at the young ones: a few megabytes of cycles at most."""
LOOKS = 20
"""Looks at one generation before the next older one is looked at."""


def settle() -> None:
    """Called once, when everything that lives as long as the process is made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, LOOKS, LOOKS)
