"""torch's schedules by their names, each a plan of Taktline's."""

from __future__ import annotations

from functools import cache, cached_property
from inspect import signature
from typing import Any, TypeVar

from taktline.compat.torch_pipelining import schedules as torchs
from taktline.compat.torch_pipelining._boundaries import like
from taktline.compat.torch_pipelining._replaced import remember
from taktline.compat.torch_pipelining._schedules import (
    Order,
    Ordered,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    placement_of,
)
from taktline.compat.torch_pipelining._stages import PipelineStage, _PipelineStage
from taktline.errors import ScheduleError, StageUseError
from taktline.plan import build
from taktline.runtime import get_schedule_class as find_native

__all__ = ["CLASSES"]

T = TypeVar("T", bound=type)


def order_of(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Order:
    """What the plan of a name has each rank compute.

    >>> order_of("gpipe", 2, 1, 1)
    {0: [0F0, 0B0], 1: [1F0, 1B0]}
    """
    plan = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return {rank: [torchs._Action.from_str(str(a)) for a in plan[rank]] for rank in range(ranks)}


class _Single(Ordered, PipelineScheduleSingle):
    """A schedule of one stage a rank that there is a plan for."""

    def _get_pipeline_order(self) -> Order | None:
        order = self._order_to_run()
        for rank, row in order.items():
            row.append(torchs._Action(rank, torchs.REDUCE_GRAD))
        return order

    def _order_to_run(self) -> Order:
        return order_of(str(self._plan_name), self._num_stages, self._n_microbatches, 1)

    def _plan_maker(self) -> Any:
        return _maker(str(self._plan_name), self._num_stages, self._n_microbatches)


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
    """One forward, one backward: as few micro-batches in flight as there are ranks ahead."""

    _plan_name = "1f1b"


class _Multi(_PipelineScheduleRuntime):
    """A schedule of several stages a rank that there is a plan for."""

    _in_rounds = False
    """Whether as many micro-batches as fill the pipeline go through each stage in turn."""

    def _begin(self, given: dict[str, Any]) -> None:
        super().__init__(**given)
        self.n_local_stages, self.num_stages = len(self._stages), self._num_stages
        self.number_of_rounds = max(1, self._n_microbatches // self.pp_group_size)
        self.microbatches_per_round = self._n_microbatches // self.number_of_rounds
        self._check_sizes()
        self.pipeline_order = self._own_order = self._order()
        self.stage_index_to_group_rank = placement_of(self.pipeline_order)
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def _check_sizes(self) -> None:
        """Raise if the schedule cannot be that large."""

    def _order(self) -> Order:
        """As torch writes it down; a plan's own, without waits, for sizes that torch refuses."""
        ranks, count = range(self.pp_group_size), self._n_microbatches
        if self._in_rounds and count != self.microbatches_per_round * self.number_of_rounds:
            return order_of(str(self._plan_name), len(ranks), count, self.n_local_stages)
        self.pipeline_order = {rank: self._calculate_single_rank_operations(rank) for rank in ranks}
        if hasattr(self, "_add_bubbles_to_actions"):
            return self._add_bubbles_to_actions(self._num_stages)
        return self.pipeline_order

    @cached_property
    def pipeline_order_with_comms(self) -> Order:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Made when somebody looks: what runs on Taktline's own stages has no need of it."""
        self._prepare_schedule_with_comms(self._own_order)
        return vars(self)["pipeline_order_with_comms"]

    def _plan_maker(self) -> Any:
        untouched = "pipeline_order_with_comms" not in vars(self)
        if untouched or self._order_as_data() is self._own_order:
            return _maker(str(self._plan_name), self._num_stages, self._n_microbatches)
        return super()._plan_maker()


def _as_in_torch(cls: T) -> T:
    """Give a schedule the arguments, and the order, of the installed torch's of its name."""
    theirs = getattr(torchs, cls.__name__)
    takes = signature(theirs.__init__)
    for name in ("_calculate_single_rank_operations", "_add_bubbles_to_actions"):
        if name in vars(theirs):
            setattr(cls, name, vars(theirs)[name])

    @like(theirs.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(takes.bind(self, *args, **kwargs).arguments)
        del given["self"]
        self._begin(given)

    cls.__init__ = __init__
    return cls


@_as_in_torch
class ScheduleLoopedBFS(_Multi):
    """GPipe over several stages a rank: each stage runs all micro-batches before the next one."""

    _plan_name = "looped_bfs"


@_as_in_torch
class ScheduleInterleaved1F1B(_Multi):
    """1F1B over several stages a rank: a smaller bubble for more messages."""

    _plan_name = "interleaved_1f1b"
    _in_rounds = True


@_as_in_torch
class ScheduleInterleavedZeroBubble(_Multi):
    """Interleaved 1F1B whose weight gradients fill what would be the bubble."""

    _plan_name = "interleaved_zero_bubble"
    _in_rounds = True


class _V(_Multi):
    """A schedule of two stages a rank."""

    def _check_sizes(self) -> None:
        if self.n_local_stages != 2:
            raise ScheduleError(
                f"ZBV requires exactly 2 stages per rank, but got {self.n_local_stages}."
            )


@_as_in_torch
class ScheduleZBVZeroBubble(_V):
    """Two stages a rank in the shape of a V; weight gradients fill the bubble."""

    _plan_name = "zbv"


@_as_in_torch
class ScheduleDualPipeV(_V):
    """Two stages a rank in the shape of a V; forwards run together with backwards."""

    _plan_name = "dualpipev"

    def _check_sizes(self) -> None:
        super()._check_sizes()
        if self._n_microbatches < self._num_stages:
            raise ScheduleError(
                "DualPipeV requires at least as many microbatches as stages, but got "
                f"{self._n_microbatches} microbatches and {self._num_stages} stages."
            )


@cache
def _maker(name: str, num_stages: int, microbatches: int) -> Any:
    """Makes the plan of a name; the same one each time, so that it is known again."""
    return lambda ranks: find_native(name)._plan(num_stages, microbatches, ranks)


CLASSES = (
    _PipelineSchedule,
    PipelineScheduleSingle,
    PipelineScheduleMulti,
    _PipelineScheduleRuntime,
    ScheduleGPipe,
    _ScheduleForwardOnly,
    Schedule1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
)
"""Those that take the places of torch's of the same names."""

remember(PipelineStage, _PipelineStage, *CLASSES)
