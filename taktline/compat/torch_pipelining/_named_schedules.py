"""torch's schedules by their names, each a plan of Taktline's."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache, cached_property
from inspect import Parameter, signature
from typing import Any

from taktline.compat.torch_pipelining import schedules as torchs
from taktline.compat.torch_pipelining._calls import HAS_LIMITS, Order
from taktline.compat.torch_pipelining._schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
)
from taktline.errors import StageUseError
from taktline.plan import build
from taktline.runtime import get_schedule_class as find_native
from taktline.runtime.runnable_plan import Limits


def order_of(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> dict[int, list[Any]]:
    """The computations of each rank in the plan of a name.

    >>> order_of("gpipe", 2, 1, 1)
    {0: [0F0, 0B0], 1: [1F0, 1B0]}
    """
    plan = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return {rank: [torchs._Action.from_str(str(a)) for a in plan[rank]] for rank in range(ranks)}


class _Single(PipelineScheduleSingle):
    """A named schedule with one stage per rank."""

    _plan_name: str
    """The plan of Taktline with the same order."""
    _step_microbatches = PipelineScheduleMulti._step_microbatches

    def _get_pipeline_order(self) -> Order | None:
        order, count = self._order_as_data(), self._n_microbatches
        return {rank: torchs._add_reduce_grad(row, count) for rank, row in order.items()}

    def _order_as_data(self) -> dict[int, list[Any]]:
        return order_of(self._plan_name, self._num_stages, self._n_microbatches, 1)

    def _plan_maker(self) -> Any:
        return _maker(self._plan_name, self._num_stages, self._n_microbatches)


class ScheduleGPipe(_Single):
    """All forwards, then all backwards."""

    _plan_name = "gpipe"


class _ScheduleForwardOnly(_Single):
    """All forwards, and nothing else."""

    _plan_name = "gpipe"

    def _get_pipeline_order(self) -> None:
        return None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch forward."""
        if any(kwargs.get(name) is not None for name in ("target", "target_mbs", "losses")):
            raise StageUseError("Forward-only schedule does not support loss computation")
        return super().step(*args, **kwargs)


class Schedule1F1B(_Single):
    """One forward, one backward in turn: at most as many micro-batches in flight as ranks."""

    _plan_name = "1f1b"


class _Multi(_PipelineScheduleRuntime):
    """A named schedule with several stages per rank; torch makes its order."""

    _plan_name: str
    _own_order: Order | None = None
    _is_idle: Any = False

    def _prepare_schedule_with_comms(self, actions: Any, format: Any = "compute_only") -> None:
        if self._own_order is not None:
            super()._prepare_schedule_with_comms(actions, format)
            return
        # At the end of torch's constructor.
        self._own_order = actions
        self._place_stages(actions)
        if self._limits != Limits() or getattr(self, "_defer_reduce_grad_wait", False):
            _ = self.pipeline_order_with_comms  # raises if it cannot keep them

    @cached_property
    def pipeline_order_with_comms(self) -> Order:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Made on first use: Taktline's own stages do not need it."""
        self._prepare_schedule_with_comms(self._own_order)
        return vars(self)["pipeline_order_with_comms"]

    def _plan_maker(self) -> Any:
        untouched = "pipeline_order_with_comms" not in vars(self)
        return self._maker_for(self._own_order) if untouched else super()._plan_maker()

    def _maker_for(self, order: Any) -> Any:
        if order is self._own_order:
            return _maker(self._plan_name, self._num_stages, self._n_microbatches)
        return super()._maker_for(order)


def _with_limits(cls: Any) -> Any:
    """Give a class the constructor of torch's class, with the limits that torch has since 2.15."""
    takes = signature(cls.__bases__[1].__init__)
    if not HAS_LIMITS:
        defaults = asdict(Limits()) | {"defer_reduce_grad_wait": False}
        more = [Parameter(k, Parameter.KEYWORD_ONLY, default=v) for k, v in defaults.items()]
        takes = takes.replace(parameters=[*takes.parameters.values(), *more])

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = takes.bind(self, *args, **kwargs).arguments
        super(cls, self).__init__(**{k: v for k, v in given.items() if k != "self"})

    __init__.__signature__ = takes
    cls.__init__ = __init__
    return cls


class _InRounds(_Multi):
    """A schedule whose micro-batches go through each stage in rounds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except ValueError:
            rounds = getattr(self, "number_of_rounds", None)
            if rounds is None or not self._n_microbatches % rounds:
                raise
            # The last round is not full: torch has no order for that, but there is a plan.
            sizes = (self.pp_group_size, self._n_microbatches, self.n_local_stages)
            self.pipeline_order = order_of(self._plan_name, *sizes)
            self._prepare_schedule_with_comms(self.pipeline_order)


@_with_limits
class ScheduleLoopedBFS(_Multi, torchs.ScheduleLoopedBFS):
    """GPipe over several stages per rank: each stage runs all micro-batches before the next one."""

    _plan_name = "looped_bfs"


@_with_limits
class ScheduleInterleaved1F1B(_InRounds, torchs.ScheduleInterleaved1F1B):
    """1F1B over several stages per rank: a smaller bubble for more messages."""

    _plan_name = "interleaved_1f1b"


@_with_limits
class ScheduleInterleavedZeroBubble(_InRounds, torchs.ScheduleInterleavedZeroBubble):
    """Interleaved 1F1B whose weight gradients fill what would be the bubble."""

    _plan_name = "interleaved_zero_bubble"


@_with_limits
class ScheduleZBVZeroBubble(_Multi, torchs.ScheduleZBVZeroBubble):
    """Two stages per rank in the shape of a V; weight gradients fill the bubble."""

    _plan_name = "zbv"


@_with_limits
class ScheduleDualPipeV(_Multi, torchs.ScheduleDualPipeV):
    """Two stages per rank in the shape of a V; forwards run together with backwards."""

    _plan_name = "dualpipev"


@cache
def _maker(name: str, num_stages: int, microbatches: int) -> Any:
    """A function that makes the plan of a name; the same function each time."""
    return lambda ranks: find_native(name)._plan(num_stages, microbatches, ranks)
