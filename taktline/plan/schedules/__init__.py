"""The schedules, one file per family; :func:`build` finds them by name.

In their docstrings, p is the number of ranks, r one of them, m the number of micro-batches and v
the number of stages per rank; F, B, I and W are the times of these actions.
"""

from importlib import import_module

from taktline.plan.schedules._registry import (
    NamedSchedule,
    build,
    each_rank,
    find,
    names,
    register,
    unregister,
)

__all__ = ["NamedSchedule", "build", "each_rank", "find", "names", "register", "unregister"]

# The order in which the commands list them: from the plainest on.
for _family in ("classic", "interleaved", "zero_bubble", "v_shaped", "memory_limited"):
    import_module(f"{__name__}.{_family}")
