"""The schedules that torch has a name for."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch.nn.modules.loss import _Loss

from taktline.compat.torch_pipelining._action import REDUCE_GRAD, _Action
from taktline.compat.torch_pipelining._runtime.base import (
    ArgsSpec,
    KwargsSpec,
    LossFn,
    MergeSpec,
)
from taktline.compat.torch_pipelining._runtime.context import _PipelineContext
from taktline.compat.torch_pipelining._runtime.interpret import play
from taktline.compat.torch_pipelining._runtime.multi import forwards_of, lowered
from taktline.compat.torch_pipelining._runtime.orders import Order, order_of, placement_of
from taktline.compat.torch_pipelining._runtime.ours import remember
from taktline.compat.torch_pipelining._runtime.runtime import _PipelineScheduleRuntime
from taktline.compat.torch_pipelining._runtime.single import PipelineScheduleSingle
from taktline.errors import ScheduleError, StageUseError

__all__ = [
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "_ScheduleForwardOnly",
]


class _Single(PipelineScheduleSingle):
    """A schedule of one stage a rank that there is a plan for."""

    def _get_pipeline_order(self) -> Order | None:
        order = self._order()
        for rank, row in order.items():
            row.append(_Action(rank, REDUCE_GRAD))
        return order

    def _order(self) -> Order:
        return order_of(str(self._plan_name), self._num_stages, self._n_microbatches, 1)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run the order of this rank, action by action."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        first = target_mbs[0] if target_mbs else None
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0], first, loss_kwargs)
        order, count = self._order(), self._n_microbatches
        if not self._has_backward:
            order, count = forwards_of(order), 0
        order = lowered(order, lambda stage: stage, self._num_stages, count)
        context = _PipelineContext(self, arg_mbs, kwarg_mbs, target_mbs, losses)
        play(self, order, self._stage.stage_index, context, return_outputs, loss_kwargs)
        self._update_losses(self._stage, losses)


class ScheduleGPipe(_Single):
    """All forwards, then all backwards."""

    _plan_name = "gpipe"


class _ScheduleForwardOnly(_Single):
    """All forwards, and nothing else."""

    _plan_name = "gpipe"

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

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        super().__init__(
            stages=stages,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )
        self.n_local_stages = len(stages)
        self.number_of_rounds = max(1, n_microbatches // self.pp_group_size)
        self.microbatches_per_round = n_microbatches // self.number_of_rounds
        self._check_sizes()
        self.pipeline_order = self._order()
        self._set_stage_mapping(placement_of(self.pipeline_order))

    def _check_sizes(self) -> None:
        """Raise if the schedule cannot be that large."""

    def _order(self) -> Order:
        per_rank = self.n_local_stages
        return order_of(str(self._plan_name), self.pp_group_size, self._n_microbatches, per_rank)

    @cached_property
    def pipeline_order_with_comms(self) -> Order:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Made when somebody looks: what runs on Taktline's own runtime has no need of it."""
        self._prepare_schedule_with_comms(self._order())
        made: Order = vars(self)["pipeline_order_with_comms"]
        self._made = (made, [*made[self.rank]])
        return made

    def _keeps_its_order(self) -> bool:
        now = vars(self).get("pipeline_order_with_comms")
        made, row = getattr(self, "_made", (None, []))
        return now is None or (now is made and now[self.rank] == row)


class ScheduleLoopedBFS(_Multi):
    """GPipe over several stages a rank: each stage runs all micro-batches before the next one."""

    _plan_name = "looped_bfs"

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: LossFn | _Loss | None = None,
        output_merge_spec: MergeSpec | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )


class ScheduleInterleaved1F1B(_Multi):
    """1F1B over several stages a rank: a smaller bubble for more messages."""

    _plan_name = "interleaved_1f1b"


class ScheduleInterleavedZeroBubble(_Multi):
    """Interleaved 1F1B whose weight gradients fill what would be the bubble."""

    _plan_name = "interleaved_zero_bubble"


class _V(_Multi):
    """A schedule of two stages a rank."""

    def _check_sizes(self) -> None:
        if self.n_local_stages != 2:
            raise ScheduleError(
                f"ZBV requires exactly 2 stages per rank, but got {self.n_local_stages}."
            )


class ScheduleZBVZeroBubble(_V):
    """Two stages a rank in the shape of a V; weight gradients fill the bubble."""

    _plan_name = "zbv"


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


remember(
    ScheduleGPipe,
    _ScheduleForwardOnly,
    Schedule1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
)
