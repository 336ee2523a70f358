"""One file a schedule; :func:`build` finds them by name."""

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

# In the order in which people are shown them: from the plainest on.
for _file in (
    "forward_only",
    "gpipe",
    "one_f_one_b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
    "v_half",
    "v_min",
):
    import_module(f"{__name__}.{_file}")
