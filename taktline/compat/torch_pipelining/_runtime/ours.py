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

from collections.abc import Callable
from functools import cache
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from taktline.compat.torch_pipelining._stage.base import _PipelineStageBase
from taktline.compat.torch_pipelining._stage.manual import Inferring, PipelineStage
from taktline.compat.torch_pipelining._stage.traced import _PipelineStage
from taktline.errors import TaktlineError, restore
from taktline.plan import Plan
from taktline.runtime import get_schedule_class
from taktline.runtime.feed import Feed
from taktline.runtime.schedule import Schedule
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
    return [vote] if device is None else find(stage.group, device).exchange(vote)


class _Noting(Schedule):
    """A schedule of Taktline that notes the output of each micro-batch."""

    chunks: list[Any]

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
            *self._made_with,
            seed=None,
            dynamic_shapes=False,
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
        try:
            output = step(
                *call.args,
                target=call.target,
                losses=call.losses,
                return_outputs=call.return_outputs,
                loss_kwargs=call.loss_kwargs,
                arg_mbs=call.arg_mbs,
                kwarg_mbs=call.kwarg_mbs,
                target_mbs=call.target_mbs,
                **call.kwargs,
            )
        except TaktlineError as error:
            raise as_in_torch(error) from error.__cause__
        for stage in theirs._local_stages:
            if stage.is_last:
                stage.output_chunks[:] = self._schedule.chunks
        return output


def _settings(schedule: _PipelineSchedule) -> tuple[int, Any, Any, Any, Any, bool]:
    return (
        schedule._n_microbatches,
        schedule._loss_fn,
        schedule._args_chunk_spec,
        schedule._kwargs_chunk_spec,
        schedule._output_merge_spec,
        schedule.scale_grads,
    )


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
    """The same error for code that expects a RuntimeError, which is what torch raises in a step.

    >>> from taktline.errors import MismatchError
    >>> error = as_in_torch(MismatchError("the ranks disagree"))
    >>> isinstance(error, RuntimeError), isinstance(error, MismatchError)
    (True, True)
    """
    if isinstance(error, RuntimeError):
        return error
    return restore(_both(type(error)), error.args, error.__dict__)


@cache
def _both(cls: type[TaktlineError]) -> type[TaktlineError]:
    def reduce(self: TaktlineError) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickled, (cls, self.args, self.__dict__)

    attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, RuntimeError), attributes)


def _unpickled(
    cls: type[TaktlineError], args: tuple[Any, ...], fields: dict[str, Any]
) -> TaktlineError:
    return restore(_both(cls), args, fields)
