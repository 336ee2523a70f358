"""Finds the plan for a schedule that is given by name, class, file or plan."""

from __future__ import annotations

import os
from typing import TypeAlias

from taktline.errors import ScheduleError
from taktline.plan import NamedSchedule, Plan, find, read
from taktline.runtime.schedule import Schedule
from taktline.text import counted

ScheduleChoice: TypeAlias = str | os.PathLike[str] | Plan | type[Schedule]
"""A name, a file, a plan, or the class of a schedule."""


def opened(schedule: ScheduleChoice) -> Plan | NamedSchedule:
    """The plan, if one was given or is in a file; else the schedule of that name."""
    if isinstance(schedule, type) and issubclass(schedule, Schedule):
        return find(schedule.__name__)
    if isinstance(schedule, os.PathLike) or (
        isinstance(schedule, str) and schedule.lower().endswith((".csv", ".json"))
    ):
        return read(schedule)
    if isinstance(schedule, str):
        return find(schedule)
    if isinstance(schedule, Plan):
        return schedule
    raise ScheduleError(f"schedule is a name, a plan, a file or a Schedule class, not {schedule!r}")


def plan_for(
    schedule: Plan | NamedSchedule,
    *,
    ranks: int,
    microbatches: int | None,
    stages: int | None = None,
    stages_per_rank: int | None = None,
) -> Plan:
    """The plan for so many ranks; ``stages`` is how many the model was cut into, if it was.

    >>> plan_for(opened("zbv"), ranks=2, microbatches=4).stages
    4
    """
    if isinstance(schedule, Plan):
        return _fitting(schedule, ranks, microbatches)
    if microbatches is None:
        raise ScheduleError(f"pass microbatches=…, the number of micro-batches for {schedule.name}")
    if stages is not None:
        per_rank, rest = divmod(stages, ranks)
        if rest or not per_rank or stages_per_rank not in (None, per_rank):
            asked = f"with {stages_per_rank} on each" if stages_per_rank else "evenly"
            raise ScheduleError(
                f"{counted(stages, 'stage')} cannot be placed on {counted(ranks, 'rank')} {asked}; "
                f"cut the model into {ranks * (stages_per_rank or schedule.stages_per_rank or 1)}"
            )
        stages_per_rank = per_rank
    return schedule.build(ranks, microbatches, stages_per_rank)


def _fitting(plan: Plan, ranks: int, microbatches: int | None) -> Plan:
    """A ready plan; raises unless it is for these numbers."""
    if plan.ranks != ranks:
        raise ScheduleError(
            f"plan {plan.name!r} is for {counted(plan.ranks, 'rank')}, not {ranks}; start "
            f"{plan.ranks}, or pass ranks={plan.ranks} without a launcher"
        )
    if microbatches not in (None, plan.microbatches):
        raise ScheduleError(
            f"plan {plan.name!r} has {counted(plan.microbatches, 'micro-batch')}, but "
            f"microbatches is {microbatches}; leave it out"
        )
    return plan
