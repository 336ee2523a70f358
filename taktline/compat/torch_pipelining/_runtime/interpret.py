"""Runs an order with its messages, action by action, by the calls that torch makes to stages.

::

    3RECV_F7   start stage.get_fwd_recv_ops(7)
    3F7        wait; stage.forward_one_chunk(7, …); the loss, if it is the last stage
    3SEND_F7   start stage.get_fwd_send_ops(7)
    3B7        wait; stage.backward_one_chunk(7, loss, …); hand over, if stage 2 lies here, too

Slower than Taktline's own runtime: everything is looked up in each step, since anything may have
been replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.profiler import record_function

from taktline.compat.torch_pipelining._action import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    _Action,
    _ComputationType,
)
from taktline.compat.torch_pipelining._p2p import logger
from taktline.compat.torch_pipelining._runtime.context import _PipelineContext
from taktline.compat.torch_pipelining._stage.compute import sync_of
from taktline.errors import CallOrderError, ScheduleError

if TYPE_CHECKING:
    from taktline.compat.torch_pipelining._runtime.base import _PipelineSchedule
    from taktline.compat.torch_pipelining._runtime.multi import Actions

__all__ = ["play"]


def play(
    schedule: _PipelineSchedule,
    order: Actions,
    rank: int,
    context: _PipelineContext,
    return_outputs: bool,
    loss_kwargs: dict[str, Any] | None,
) -> None:
    """Run the actions of a rank, on its stages."""
    for left in (schedule.fwd_recv_ops, schedule.bwd_recv_ops, schedule.unsharded_stages):
        left.clear()
    schedule.backward_counter.clear()
    _Interpreter(schedule, context, return_outputs, loss_kwargs).run(order, rank)


class _Interpreter:
    """One step of a schedule on this rank."""

    def __init__(
        self,
        schedule: Any,
        context: _PipelineContext,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        # Late, and by their names there, so that whoever replaces one is heard.
        from taktline.compat.torch_pipelining import schedules

        self._p2p: Any = schedules
        self._schedule = schedule
        self._context = context
        self._return_outputs = return_outputs
        self._loss_kwargs = loss_kwargs
        self._stages = {stage.stage_index: stage for stage in schedule._local_stages}
        self._sends: list[Any] = []
        self._handlers: dict[_ComputationType, Callable[[_Action, Any], None]] = {
            SEND_F: self._send_forward,
            SEND_B: self._send_backward,
            RECV_F: self._receive_forward,
            RECV_B: self._receive_backward,
            FORWARD: self._forward,
            FULL_BACKWARD: self._backward,
            BACKWARD_INPUT: self._backward,
            BACKWARD_WEIGHT: self._weight,
            UNSHARD: self._unshard,
            RESHARD: self._reshard,
            REDUCE_GRAD: self._reduce,
        }

    def run(self, order: Actions, rank: int) -> None:
        """Run the actions of a rank, and wait for what they have sent."""
        for number, action in enumerate(order[rank]):
            if action is None:
                continue
            try:
                with record_function(self._p2p._get_profiler_function_name(action)):
                    self._perform(action)
            except Exception:
                name = type(self._schedule).__name__
                table = self._p2p._format_pipeline_order(order, error_step_number=number)
                logger.error(
                    "%s: step %s, running %s, has failed. Full order:\n%s",
                    name,
                    number,
                    action,
                    table,
                )
                raise
        for work in self._sends:
            self._p2p._wait_batch_p2p(work)

    def _perform(self, action: _Action) -> None:
        kind = action.computation_type
        custom = getattr(self._schedule, "_comp_type_to_function_map", {}).get(kind)
        if custom is not None:
            custom(action, self._context)
            return
        if kind is OVERLAP_F_B:
            if action.sub_actions is None:
                raise CallOrderError("sub_actions must be set")
            for part in action.sub_actions:
                self._perform(part)
            return
        if kind not in self._handlers:
            raise ScheduleError(f"{action=} is unknown or unsupported")
        self._handlers[kind](action, self._stages[action.stage_index])

    def _send_forward(self, action: _Action, stage: Any) -> None:
        ops = stage.get_fwd_send_ops(action.microbatch_index)
        self._sends.append(self._started(ops, action, action.stage_index))

    def _send_backward(self, action: _Action, stage: Any) -> None:
        ops = stage.get_bwd_send_ops(action.microbatch_index)
        self._sends.append(self._started(ops, action, action.stage_index - 1))

    def _receive_forward(self, action: _Action, stage: Any) -> None:
        key = self._unposted(self._schedule.fwd_recv_ops, action, "forward")
        ops = stage.get_fwd_recv_ops(action.microbatch_index)
        self._schedule.fwd_recv_ops[key] = self._started(ops, action, action.stage_index - 1)

    def _receive_backward(self, action: _Action, stage: Any) -> None:
        key = self._unposted(self._schedule.bwd_recv_ops, action, "backward")
        ops = stage.get_bwd_recv_ops(action.microbatch_index)
        self._schedule.bwd_recv_ops[key] = self._started(ops, action, action.stage_index)

    def _unposted(self, pending: dict[Any, Any], action: _Action, name: str) -> tuple[Any, Any]:
        stage_idx, mb_index = action.stage_index, action.microbatch_index
        if (stage_idx, mb_index) in pending:
            raise CallOrderError(
                f"Recv twice for {stage_idx=} {mb_index=} without executing {name}"
            )
        return stage_idx, mb_index

    def _started(self, ops: Sequence[Any], action: _Action, boundary: int) -> Any:
        """Start the messages of an action, which cross the boundary after a stage.

        Each message has a number of its own, so that two ranks need not agree on an order.
        """
        count, back = self._schedule._n_microbatches, action.computation_type in (SEND_B, RECV_B)
        tag = 1 + (2 * boundary + back) * count + (action.microbatch_index or 0)
        for op in ops:
            if isinstance(op, dist.P2POp):
                op.tag = tag
        return self._p2p._batch_p2p(ops)

    def _arrived(self, pending: dict[Any, Any], action: _Action, neighbour: int) -> None:
        """Wait for what a neighbour on another rank sends."""
        if neighbour in self._stages:
            return
        key = (action.stage_index, action.microbatch_index)
        if key not in pending:
            raise CallOrderError(f"Computing {action=} before receiving input")
        self._p2p._wait_batch_p2p(pending.pop(key))

    def _forward(self, action: _Action, stage: Any) -> None:
        self._schedule._assert_unsharded(stage)
        microbatch, context = action.microbatch_index, self._context
        if not stage.is_first:
            self._arrived(self._schedule.fwd_recv_ops, action, action.stage_index - 1)
        output = stage.forward_one_chunk(
            microbatch,
            _at(context.arg_mbs, microbatch),
            _at(context.kwarg_mbs, microbatch),
            save_forward_output=self._return_outputs,
        )
        self._schedule._maybe_compute_loss(
            stage,
            output,
            context.target_mbs,
            microbatch,
            *([] if self._loss_kwargs is None else [self._loss_kwargs]),
        )
        after = self._stages.get(action.stage_index + 1)
        if after is not None:
            after.set_local_fwd_input(output, microbatch)

    def _backward(self, action: _Action, stage: Any) -> None:
        schedule, microbatch = self._schedule, action.microbatch_index
        schedule._assert_unsharded(stage)
        full = action.computation_type is FULL_BACKWARD
        if not stage.is_last:
            self._arrived(schedule.bwd_recv_ops, action, action.stage_index + 1)
        schedule.backward_counter[action.stage_index] += full
        stage.backward_one_chunk(
            microbatch,
            loss=schedule._maybe_get_loss(stage, microbatch),
            full_backward=full,
            last_backward=full and self._is_last(action),
        )
        before = self._stages.get(action.stage_index - 1)
        if before is not None:
            before.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    def _weight(self, action: _Action, stage: Any) -> None:
        self._schedule._assert_unsharded(stage)
        self._schedule.backward_counter[action.stage_index] += 1
        last = self._is_last(action)
        stage.backward_weight_one_chunk(action.microbatch_index, last_backward=last)

    def _is_last(self, action: _Action) -> bool:
        done = self._schedule.backward_counter[action.stage_index]
        return done == self._schedule._n_microbatches

    def _unshard(self, action: _Action, stage: Any) -> None:
        sync = sync_of(stage)
        if sync is None or not sync.shards:
            return
        if action.stage_index in self._schedule.unsharded_stages:
            stage_idx = action.stage_index
            raise CallOrderError(f"Unsharding the same {stage_idx=} twice")
        sync.unshard()
        self._schedule.unsharded_stages.add(action.stage_index)

    def _reshard(self, action: _Action, stage: Any) -> None:
        if action.stage_index in self._schedule.unsharded_stages:
            self._schedule.unsharded_stages.remove(action.stage_index)
            stage.grad_sync.reshard()

    def _reduce(self, action: _Action, stage: Any) -> None:
        schedule = self._schedule
        # Forward only, there is nothing to reduce.
        if schedule._has_backward:
            stage.perform_reduce_grad(schedule._n_microbatches if schedule.scale_grads else 1)


def _at(values: Sequence[Any] | None, microbatch: int | None) -> Any:
    return None if values is None or microbatch is None else values[microbatch]
