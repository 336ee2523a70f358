"""Schedules that nothing is written against run on Taktline's own runtime.

A schedule is ours to run if all that can be seen of it is what these classes define: its class and
those of its stages replace no method, nobody has put a function in a method's place, its order is
the one that it was made with, and no action has a function of its own. Then what a step does is
known, and how it does it is not: gradients add up over steps, a failing rank does not hang the
others, memory follows what is in flight.

Everything else relies on the calls that torch makes to stages, one by one, and gets them
(:mod:`~taktline.compat.torch_pipelining._runtime.interpret`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from inspect import isfunction
from typing import TYPE_CHECKING, Any

import torch

from taktline.compat.torch_pipelining._stage.base import _PipelineStageBase
from taktline.compat.torch_pipelining._stage.manual import Inferring, PipelineStage
from taktline.compat.torch_pipelining._stage.traced import _PipelineStage
from taktline.errors import BatchError, PipeliningMetadataError, TaktlineError, restore
from taktline.plan import Plan
from taktline.runtime import get_schedule_class
from taktline.runtime.schedule import Schedule
from taktline.runtime.step_data import Feed
from taktline.stage import PipelineStage as OwnStage
from taktline.transport import find

if TYPE_CHECKING:
    from taktline.compat.torch_pipelining._runtime.base import _PipelineSchedule
    from taktline.compat.torch_pipelining._runtime.step import Call

__all__ = ["Ours", "agreed_on_ours", "runs_on_ours"]

_METHODS: dict[type, dict[str, Any]] = {}
"""The methods of each class as they were defined, so that a replaced one is noticed."""


def remember(*classes: type) -> None:
    """Note the methods of classes whose instances can run on Taktline's own runtime."""
    for cls in classes:
        names = (name for name in dir(cls) if not name.startswith("__"))
        found = ((name, getattr(cls, name)) for name in names)
        _METHODS[cls] = {name: value for name, value in found if isfunction(value)}


remember(PipelineStage, _PipelineStage)


def runs_on_ours(schedule: _PipelineSchedule) -> bool:
    """Whether nothing of a schedule relies on how torch runs one."""
    return (
        schedule._plan_name is not None
        and _as_defined(schedule)
        and not getattr(schedule, "_comp_type_to_function_map", None)
        and schedule._keeps_its_order()
        and all(_as_defined(s) and not s._runtime_validate for s in schedule._local_stages)
    )


def _as_defined(value: object) -> bool:
    """Whether an object's methods are those that its class had when it was defined here."""
    methods = next((_METHODS[cls] for cls in type(value).__mro__ if cls in _METHODS), None)
    return methods is not None and all(
        getattr(getattr(value, name, None), "__func__", None) is method
        for name, method in methods.items()
    )


def agreed_on_ours(schedule: _PipelineSchedule) -> bool:
    """Whether a step runs on Taktline's own runtime, on every rank.

    Ranks ask each other before the first step. Whoever leaves it later, by giving an action a
    function, say, does so on every rank.
    """
    mine = runs_on_ours(schedule)
    known = schedule._on_ours
    if known is None:
        stages = schedule._local_stages
        static = all(isinstance(s, Inferring) and s.knows_shapes for s in stages)
        votes = _votes(stages[0], mine, static)
        known = all(vote[0] for vote in votes)
        for stage in stages:
            if isinstance(stage, Inferring):
                stage._votes_static = all(vote[1] for vote in votes)
    schedule._on_ours = known and mine
    return schedule._on_ours


def _votes(stage: Any, mine: bool, static: bool) -> list[list[int]]:
    vote = [int(mine), int(static)]
    if not isinstance(stage, _PipelineStageBase) or getattr(stage, "group_size", 1) == 1:
        return [vote]
    device = getattr(stage, "device", None)
    if device is None:
        return [vote]
    return find(stage.group, torch.device(device)).exchange(vote, "a schedule's first step")


class _Noting(Schedule):
    """A schedule of Taktline that notes the output of each micro-batch."""

    chunks: list[Any]
    _compared = ()  # in torch, ranks may be given what they do not use

    def _merged(self, feed: Feed) -> Any:
        outputs = feed.outputs or {}
        self.chunks = [outputs[m] for m in sorted(outputs)]
        return super()._merged(feed)


class Ours:
    """A schedule of Taktline that does what one of these does."""

    def __init__(self, schedule: _PipelineSchedule) -> None:
        stages = schedule._local_stages
        name, count = str(schedule._plan_name), schedule._n_microbatches
        num_stages = stages[0].num_stages

        def make_plan(ranks: int) -> Plan:
            return get_schedule_class(name)._plan(num_stages, count, ranks)

        self._theirs = schedule
        self._made_with = _settings(schedule)
        self._stages = [_own(stage) for stage in stages]
        self._schedule = _Noting(
            self._stages,
            **self._made_with,
            seed=None,
            name=type(schedule).__name__,
            make_plan=make_plan,
        )

    @classmethod
    def of(cls, schedule: _PipelineSchedule) -> Ours:
        """The one of a schedule, made anew if its settings have changed."""
        known = schedule._ours
        if known is None or known._made_with != _settings(schedule):
            known = schedule._ours = cls(schedule)
        return known

    def run(self, call: Call) -> Any:
        """One step."""
        theirs = self._theirs
        for own, stage in zip(self._stages, theirs._local_stages, strict=True):
            own.submod, own.dw_builder = stage.submod, stage.dw_builder
        step = self._schedule.step if theirs._has_backward else self._schedule.eval
        self._schedule.chunks = []
        options = {"losses": call.losses, "return_outputs": call.return_outputs}
        args, kwargs = self._cut(call)
        try:
            output = step(*args, loss_kwargs=call.loss_kwargs, **options, **kwargs)
        except TaktlineError as error:
            raise as_in_torch(error) from error.__cause__
        for stage in theirs._local_stages:
            if stage.is_last:
                stage.output_chunks[:] = self._schedule.chunks
        return output

    def _cut(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch as torch cuts it: each argument by itself, whatever the others' sizes.

        What cannot be cut so is left whole: then all ranks are told why.
        """
        names = ("arg_mbs", "kwarg_mbs", "target_mbs")
        count = self._theirs._n_microbatches
        with suppress(BatchError):
            cut = call.microbatches(self._theirs)
            if all(chunks is None or len(chunks) == count for chunks in cut):
                return (), dict(zip(names, cut, strict=True))
        given = zip(names, (call.arg_mbs, call.kwarg_mbs, call.target_mbs), strict=True)
        return call.args, {**call.kwargs, **dict(given), "target": call.target}


def _settings(schedule: _PipelineSchedule) -> dict[str, Any]:
    return {
        "n_microbatches": schedule._n_microbatches,
        "loss_fn": schedule._loss_fn,
        "args_chunk_spec": schedule._args_chunk_spec,
        "kwargs_chunk_spec": schedule._kwargs_chunk_spec,
        "output_merge_spec": schedule._output_merge_spec,
        "scale_grads": schedule.scale_grads,
        "dynamic_shapes": schedule.dynamic_shapes,
    }


def _own(stage: Any) -> OwnStage:
    inputs, outputs = getattr(stage, "examples", (None, None))
    return OwnStage(
        stage.submod,
        stage.stage_index,
        stage.num_stages,
        stage.device,
        inputs,
        outputs,
        group=stage.group,
        dw_builder=stage.dw_builder,
        get_mesh=getattr(stage, "get_mesh", None),
    )


def as_in_torch(error: TaktlineError) -> TaktlineError:
    """The same error for code that expects what torch raises in a step.

    That is a RuntimeError, and a PipeliningMetadataError if a value is not as it was.

    >>> from taktline.errors import MismatchError
    >>> error = as_in_torch(MismatchError("the ranks disagree"))
    >>> isinstance(error, RuntimeError), isinstance(error, MismatchError)
    (True, True)
    """
    args, kind = error.args, RuntimeError
    if found := _MISFIT.search(str(error)):
        what = "dtype" if found["shape"] == found["expected"] else "shape"
        args, kind = (f"{error} ({what} mismatch)",), PipeliningMetadataError
    return (
        error if isinstance(error, kind) else restore(_both(type(error), kind), args, vars(error))
    )


_MISFIT = re.compile(r"put \d+ is \w+(?P<shape>\[.*?\]).*?, not \w+(?P<expected>\[.*?\])")
"""How a value that is not as expected is told (:class:`taktline.meta.Signature`)."""


@cache
def _both(cls: type[TaktlineError], kind: type[Exception]) -> type[TaktlineError]:
    def reduce(self: TaktlineError) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickled, (cls, kind, self.args, vars(self))

    attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, kind), attributes)


def _unpickled(
    cls: type[TaktlineError], kind: type[Exception], args: tuple[Any, ...], fields: dict[str, Any]
) -> TaktlineError:
    return restore(_both(cls, kind), args, fields)
