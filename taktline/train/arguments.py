"""Checks the arguments of a pipeline before anything is built; the plan that they ask for."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from taktline.checks import (
    refuse,
    require_callable,
    require_flag,
    require_instance,
    require_iterable,
    require_number,
    require_whole,
)
from taktline.device import require_usable_device
from taktline.errors import MismatchError, PartitionError, ScheduleError
from taktline.plan import NamedSchedule, Plan, find, read
from taktline.runtime.schedule import Schedule
from taktline.split import Pipe
from taktline.split.arguments import arguments_of
from taktline.text import counted


def _require_state(name: str, value: Any) -> None:
    if not hasattr(value, "__getitem__"):
        refuse(name, "a mapping from names to tensors", value)


def _require_wrapper(name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in ("ddp", "fsdp"):
        raise MismatchError(f'{name} is "ddp", "fsdp" or None, not {value!r}')


_FLAGS = ("dynamic_shapes", "cuda_graphs", "run_ahead", "compile", "measure", "check_finite")
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(_FLAGS, require_flag),
    **dict.fromkeys(("loss_fn", "prepare", "on_preempt"), require_callable),
    "microbatches": partial(require_whole, least=1, error=ScheduleError),
    "stages_per_rank": partial(require_whole, least=1, error=ScheduleError),
    "report_stragglers": partial(require_whole, least=1),
    "seed": require_whole,
    "mesh": partial(require_instance, kind=DeviceMesh),
    "state_dict": _require_state,
    "data_parallel": _require_wrapper,
}


def checked(given: dict[str, Any]) -> SimpleNamespace:
    """The arguments of a pipeline by name; raises unless each is valid, as far as one can see."""
    for name, require in _CHECKS.items():
        if given[name] is not None or require is require_flag:  # all but flags may be None
            require(name, given[name])
    found = SimpleNamespace(**{name: value for name, value in given.items() if name != "self"})
    whole = isinstance(found.model, nn.Module) and not isinstance(found.model, Pipe)
    if found.measure and (not whole or found.example is None or found.cuts is not None):
        raise PartitionError(
            "measure=True cuts a model by the times of its layers: pass the whole model and "
            "example=(…), the arguments of one micro-batch, and no cuts; or leave out measure=True"
        )
    found.example = None if found.example is None else arguments_of(found.example)
    if found.cuts is not None:
        takes = "a list of names of submodules"
        found.cuts = require_iterable("cuts", found.cuts, takes, PartitionError)
    if found.device is not None:
        found.device = require_usable_device(found.device)
    if found.timeout is not None and not isinstance(found.timeout, timedelta):
        found.timeout = timedelta(seconds=require_number("timeout", found.timeout, least=0.001))
    return found


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
