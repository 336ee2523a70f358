"""Schedules with several stages on each rank, whose order is data."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from taktline.compat.torch_pipelining._action import F, _Action
from taktline.compat.torch_pipelining._checks import _validate_schedule
from taktline.compat.torch_pipelining._lowering import _add_send_recv
from taktline.compat.torch_pipelining._passes import _add_reduce_grad, _add_unshard_reshard
from taktline.compat.torch_pipelining._runtime.base import (
    ArgsSpec,
    KwargsSpec,
    LossFn,
    MergeSpec,
    _PipelineSchedule,
)
from taktline.compat.torch_pipelining._runtime.context import _PipelineContext
from taktline.compat.torch_pipelining._runtime.initialise import initialise
from taktline.compat.torch_pipelining._runtime.interpret import play
from taktline.compat.torch_pipelining._runtime.orders import Order, placement_of
from taktline.errors import InvalidOrderError, MismatchError, StageUseError

__all__ = ["Actions", "PipelineScheduleMulti", "forwards_of", "lowered"]

Format = Literal["compute_only", "compute_comms"]
Actions = Mapping[int, Sequence[_Action | None]]


class PipelineScheduleMulti(_PipelineSchedule):
    """A schedule that runs what ``pipeline_order`` says: for each rank, its computations in order.

    A None in it is a rank that waits, which here means nothing: messages tell when to go on.
    """

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
    ) -> None:
        super().__init__(
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )
        if not stages:
            raise MismatchError(f"{type(self).__name__} needs the stages of this rank")
        self._stages = stages
        self._num_stages: int = stages[0].num_stages
        self.pp_group_size: int = stages[0].group_size
        self.rank: int = stages[0].group_rank
        self.use_full_backward = use_full_backward
        self._backward_requires_autograd = backward_requires_autograd
        self._stages_forward_initialized = False
        self._stages_backward_initialized = False
        self.pipeline_order: Order = {}
        self._set_stage_mapping({s: s % self.pp_group_size for s in range(self._num_stages)})

    def _should_compute_loss(self, stage: Any) -> bool:
        """Whether a stage is the one that the loss is computed after."""
        return stage.is_last and self._loss_fn is not None

    def _get_pipeline_order(self) -> Order | None:
        """What each rank computes."""
        return self.pipeline_order

    def _set_stage_mapping(self, ranks: dict[int, int]) -> None:
        self.stage_index_to_group_rank = ranks
        for stage in self._stages:
            stage.stage_index_to_group_rank = ranks

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        """Make sure that an order is whole, and note which rank it puts each stage on."""
        size, count = self.pp_group_size, self._n_microbatches
        self._set_stage_mapping(_validate_schedule(actions, size, self._num_stages, count))

    def _validate_adjacent_stage_communication(self) -> None:
        """Make sure that stages talk to the next ones only."""
        for stage in self._stages:
            here = stage.stage_index
            sources = {
                info.source
                for infos in getattr(stage, "args_recv_info", {}).values()
                for info in infos or ()
                if getattr(info, "source", None) is not None
            }
            targets = {
                goal
                for goals in getattr(stage, "act_send_info", {}).values()
                for goal in goals
                if goal is not None
            }
            for direction, found, allowed in (
                ("source", sources, {here - 1}),
                ("destination", targets, {here + 1}),
            ):
                if found - allowed:
                    raise StageUseError(
                        "PipelineScheduleMulti only supports adjacent-stage communication, but "
                        f"stage {here} has {direction} stages {sorted(found)} with non-adjacent "
                        f"stages {sorted(found - allowed)} (allowed adjacent stages: "
                        f"{sorted(allowed)}). This commonly indicates skip connections, which are "
                        "unsupported in this schedule runtime."
                    )

    def _initialize_stages(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        target: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Let the stages find out what crosses their boundaries, if they have not yet."""
        done = (self._stages_forward_initialized, self._stages_backward_initialized)
        done = initialise(self, args, kwargs, target, loss_kwargs, *done)
        self._stages_forward_initialized, self._stages_backward_initialized = done
        self._validate_adjacent_stage_communication()

    def _dump_csv(self, filename: str) -> None:
        """Write the order to a file, a row for each rank."""
        write_csv(filename, self.pipeline_order)

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:
        """Read the order from a file."""
        if format != "compute_only":
            raise InvalidOrderError(f'format must be "compute_only", got {format}')
        self.pipeline_order = read_csv(filename)
        self._validate_and_set_stage_mapping(self.pipeline_order)

    def _rank_of(self, stage: int) -> int:
        return self.stage_index_to_group_rank[stage]

    def _placing(self) -> Actions:
        """The order that says where stages are."""
        return self.pipeline_order

    def _order_to_run(self) -> Actions:
        """What to interpret."""
        return lowered(self.pipeline_order, self._rank_of, self._num_stages, self._n_microbatches)

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
        # Whoever has only set an order has said with it where stages are.
        self._set_stage_mapping(self.stage_index_to_group_rank | placement_of(self._placing()))
        self._initialize_stages(arg_mbs[0], kwarg_mbs[0], first, loss_kwargs)
        order = self._order_to_run()
        if not self._has_backward:
            order = lowered(forwards_of(order), self._rank_of, self._num_stages, 0)
        context = _PipelineContext(self, arg_mbs, kwarg_mbs, target_mbs, losses)
        play(self, order, self.rank, context, return_outputs, loss_kwargs)
        self._update_losses(self._stages, losses)


def lowered(order: Actions, rank_of: Any, num_stages: int, reduced: int) -> Order:
    """An order of computations, with its messages and all that wrapped stages need.

    Args:
        order: the computations.
        rank_of: the rank of a stage.
        num_stages: how many there are.
        reduced: after how many backwards a stage is reduced; 0 for never.
    """
    sharded = {rank: _add_unshard_reshard([*row]) for rank, row in order.items()}
    rows = {r: _add_reduce_grad([*row], reduced) if reduced else row for r, row in sharded.items()}
    plain = {rank: [a for a in row if a is not None] for rank, row in rows.items()}
    return {rank: [*row] for rank, row in _add_send_recv(plain, rank_of, num_stages).items()}


def forwards_of(order: Actions) -> Order:
    """The forwards of an order alone."""
    return {rank: [part for a in row for part in _forwards(a)] for rank, row in order.items()}


def _forwards(action: _Action | None) -> list[_Action]:
    if action is None:
        return []
    return [part for part in action.sub_actions or (action,) if part.computation_type is F]


def write_csv(filename: str, order: Actions) -> None:
    """Write an order to a file, a row for each rank."""
    with open(filename, "w", newline="") as file:
        writer = csv.writer(file)
        for rank in order:
            writer.writerow(["" if action is None else str(action) for action in order[rank]])


def read_csv(filename: str) -> Order:
    """Read an order from a file."""
    with open(filename, newline="") as file:
        return {
            rank: [_Action.from_str(cell) for cell in row]
            for rank, row in enumerate(csv.reader(file))
        }
