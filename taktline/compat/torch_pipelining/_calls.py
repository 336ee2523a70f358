"""Runs a step by the calls that torch makes to stages, as instructions of Taktline's program.

::

    3RECV_F7   start stage.get_fwd_recv_ops(7)
    3F7        wait; stage.forward_one_chunk(7, …); the loss, if it is the last stage
    3SEND_F7   start stage.get_fwd_send_ops(7)
    3B7        wait; stage.backward_one_chunk(7, loss, …); hand over, if stage 2 lies here, too

A rank that has failed still takes part in every message, and sends zeros, so that no rank hangs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from taktline.compat.torch_pipelining import schedules as torchs
from taktline.compat.torch_pipelining._stages import reduced
from taktline.errors import CallOrderError, ScheduleError
from taktline.plan import Action, Kind
from taktline.pytree import tree_leaves
from taktline.runtime.program import Instruction, Program
from taktline.runtime.stage_actions import Binding

Order = Mapping[int, Sequence[Any]]
"""Actions by rank; a None is a rank that waits."""


@dataclass
class Calls:
    """One step of a schedule on this rank."""

    schedule: Any
    context: Any
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.functions = getattr(schedule, "_comp_type_to_function_map", {})
        self.stages = {stage.stage_index: stage for stage in schedule._running_stages}
        self.underway: dict[Any, dict[tuple[int, int | None], Any]] = {
            torchs.RECV_F: schedule.fwd_recv_ops,
            torchs.RECV_B: schedule.bwd_recv_ops,
            torchs.SEND_F: {},
            torchs.SEND_B: {},
        }
        """Messages of each kind that were not waited for yet, by stage and micro-batch."""
        left = (schedule.backward_counter, schedule._internal_losses, schedule.unsharded_stages)
        for values in (*left, *self.underway.values()):
            values.clear()

    def prepare(self) -> None:
        """Let stages find their metadata, if they have not yet."""
        context, targets = self.context, self.context.target_mbs
        self.schedule._prepare(
            # Before 2.12, only the rank of the first stage may pass arguments.
            context.arg_mbs[0] if context.arg_mbs and 0 in self.stages else (),
            context.kwarg_mbs[0] if context.kwarg_mbs else {},
            targets[0] if targets else None,
            self.loss_kwargs,
        )

    def sizes(self) -> list[Any]:
        """The sizes of all tensors in the first micro-batch of this rank."""
        parts = (self.context.arg_mbs, self.context.kwarg_mbs)
        first = tree_leaves([values[0] for values in parts if values])
        return [x.shape for x in first if isinstance(x, torch.Tensor)]

    def finish(self) -> None:
        """Fill the caller's list of losses; there are none in an evaluation without targets."""
        schedule = self.schedule
        made = schedule._has_backward or schedule._internal_losses
        schedule._update_losses(schedule._running_stages, self.context.losses if made else None)

    def row(self) -> list[Any]:
        """The actions of this rank, in order."""
        schedule = self.schedule
        order = schedule._order_to_run()
        if not schedule._has_backward:
            forwards = {
                rank: [part for part in leaves(row) if part.computation_type == torchs.FORWARD]
                for rank, row in order.items()
            }
            order = lowered(forwards, schedule, 0)
        return [action for action in order.get(schedule.rank, ()) if action is not None]

    def instructions(self) -> Iterator[Instruction]:
        """Each action: how it runs, and what it does if this rank has failed."""
        for action in self.row():
            whole = action.computation_type in self.functions
            for part in (action,) if whole else _parts(action):
                planned = _as_planned(_parts(part)[0])
                yield Instruction(planned, partial(self._run, part), partial(self._forgo, part))

    def _run(self, action: Any) -> None:
        with record_function(torchs._get_profiler_function_name(action)):
            custom = self.functions.get(action.computation_type)
            if custom is not None:
                custom(action, self.context)
            elif action.stage_index not in self.stages:
                raise ScheduleError(f"{action=}: its stage is not on this rank")
            else:
                self._perform(action, self.stages[action.stage_index])

    def _perform(self, action: Any, stage: Any) -> None:
        match action.computation_type:
            case torchs.FORWARD:
                self._forward(action, stage)
            case torchs.FULL_BACKWARD | torchs.BACKWARD_INPUT | torchs.BACKWARD_WEIGHT:
                self._backward(action, stage)
            case torchs.SEND_F | torchs.SEND_B | torchs.RECV_F | torchs.RECV_B:
                self._start(action, stage)
            case torchs.UNSHARD | torchs.RESHARD:
                self._shard(action, stage)
            case torchs.REDUCE_GRAD:
                self._reduce(stage)
            case kind if kind.value in ("WAIT_SEND_F", "WAIT_SEND_B"):
                self._wait(getattr(torchs, kind.value.removeprefix("WAIT_")), action)
                if kind.value == "WAIT_SEND_F":
                    stage.release_fwd_send_outputs(action.microbatch_index)
            case kind if kind.value == "WAIT_REDUCE_GRAD":
                pass  # REDUCE_GRAD has waited
            case _:
                raise ScheduleError(f"{action=} is unknown or unsupported")

    def _start(self, action: Any, stage: Any) -> None:
        """Start the messages of an action; each has a tag of its own, so that no order matters."""
        kind, count = action.computation_type, self.schedule._n_microbatches
        stage_idx, mb_index = key = (action.stage_index, action.microbatch_index)
        verb, way = kind.value.split("_")
        name = "forward" if way == "F" else "backward"
        if verb == "RECV" and key in self.underway[kind]:
            raise CallOrderError(
                f"Recv twice for {stage_idx=} {mb_index=} without executing {name}"
            )
        ops = getattr(stage, f"get_{name[0]}wd_{verb.lower()}_ops")(mb_index)
        boundary = stage_idx - (kind in (torchs.RECV_F, torchs.SEND_B))
        for op in ops:
            if isinstance(op, dist.P2POp):
                if verb == "SEND":
                    # Groups refuse any other; the message does not keep the graph.
                    op.tensor = op.tensor.detach().contiguous()
                op.tag = 1 + (2 * boundary + (way == "B")) * count + mb_index
        self.underway[kind][key] = torchs._batch_p2p(ops)

    def _reduce(self, stage: Any) -> None:
        if not self.schedule._has_backward:
            return
        if self.schedule._postpones(stage):
            stage.gradients_due = False
        else:
            stage.perform_reduce_grad(self.schedule._grad_factor)

    def _wait(self, kind: Any, action: Any) -> None:
        """Wait for the message of an action, if it was started."""
        key = (action.stage_index, action.microbatch_index)
        torchs._wait_batch_p2p(self.underway[kind].pop(key, ()))

    def _receive(self, kind: Any, action: Any, neighbour: int) -> None:
        """Wait for a message from a neighbour on another rank."""
        if neighbour not in self.stages:
            if (action.stage_index, action.microbatch_index) not in self.underway[kind]:
                raise CallOrderError(f"Computing {action=} before receiving input")
            self._wait(kind, action)

    def _forward(self, action: Any, stage: Any) -> None:
        schedule, context, microbatch = self.schedule, self.context, action.microbatch_index
        schedule._assert_unsharded(stage)
        if not stage.is_first:
            self._receive(torchs.RECV_F, action, action.stage_index - 1)
        output = stage.forward_one_chunk(
            microbatch,
            context.arg_mbs[microbatch],
            context.kwarg_mbs[microbatch],
            save_forward_output=self.return_outputs,
        )
        loss_kwargs = () if self.loss_kwargs is None else (self.loss_kwargs,)
        schedule._maybe_compute_loss(stage, output, context.target_mbs, microbatch, *loss_kwargs)
        after = self.stages.get(action.stage_index + 1)
        if after is not None:
            after.set_local_fwd_input(output, microbatch)

    def _backward(self, action: Any, stage: Any) -> None:
        schedule, kind, microbatch = self.schedule, action.computation_type, action.microbatch_index
        schedule._assert_unsharded(stage)
        if kind != torchs.BACKWARD_WEIGHT and not stage.is_last:
            self._receive(torchs.RECV_B, action, action.stage_index + 1)
        schedule.backward_counter[action.stage_index] += kind != torchs.BACKWARD_INPUT
        done = schedule.backward_counter[action.stage_index] == schedule._n_microbatches
        if kind == torchs.BACKWARD_WEIGHT:
            stage.backward_weight_one_chunk(microbatch, last_backward=done)
            return
        full = kind == torchs.FULL_BACKWARD
        stage.backward_one_chunk(
            microbatch,
            loss=schedule._maybe_get_loss(stage, microbatch),
            full_backward=full,
            last_backward=full and done,
        )
        before = self.stages.get(action.stage_index - 1)
        if before is not None:
            before.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    def _shard(self, action: Any, stage: Any) -> None:
        schedule, stage_idx = self.schedule, action.stage_index
        if not schedule._is_sharded(stage):
            return
        if action.computation_type == torchs.UNSHARD:
            if stage_idx in schedule.unsharded_stages:
                raise CallOrderError(f"Unsharding the same {stage_idx=} twice")
            schedule._assert_unsharded(stage)
        elif stage_idx in schedule.unsharded_stages:
            schedule.unsharded_stages.remove(stage_idx)
            stage.grad_sync.reshard()

    def _forgo(self, action: Any) -> None:
        """Take part in the messages of an action after this rank has failed."""
        for part in _parts(action):
            stage, kind = self.stages.get(part.stage_index), part.computation_type
            if kind in (torchs.SEND_F, torchs.SEND_B):
                _fill_with_zeros(stage, kind, part.microbatch_index)
            if kind in self.underway:
                self._start(part, stage)
            elif kind == torchs.FORWARD:
                self._wait(torchs.RECV_F, part)
            elif kind in (torchs.FULL_BACKWARD, torchs.BACKWARD_INPUT):
                self._wait(torchs.RECV_B, part)
            elif (sync := getattr(stage, "grad_sync", None)) is not None:
                if kind in (torchs.UNSHARD, torchs.RESHARD):
                    getattr(sync, f"forgo_{kind.value.lower()}")()
                elif kind == torchs.REDUCE_GRAD:
                    sync.forgo_reduce()

    def settle_all(self) -> None:
        """Wait until every message is sent."""
        for kind in (torchs.SEND_F, torchs.SEND_B):
            for work in self.underway[kind].values():
                torchs._wait_batch_p2p(work)
            self.underway[kind].clear()


def _parts(action: Any) -> tuple[Any, ...]:
    """The two actions of an overlap, or the action itself."""
    return action.sub_actions or (action,)


def _fill_with_zeros(stage: Any, kind: Any, microbatch: int) -> None:
    """Give a stage zeros to send for a micro-batch that it has not computed."""
    if kind == torchs.SEND_B:
        infos = stage.args_recv_info[microbatch]
        found = stage.bwd_cache.get(microbatch, [None] * len(infos))
        if not hasattr(stage, "_get_grad_send_meta"):
            # Since 2.13, stages do this themselves.
            buffers = [torch.zeros_like(info.buffer) for info in infos]
            found = [zeros if x is None else x for x, zeros in zip(found, buffers, strict=False)]
        stage.bwd_cache[microbatch] = tuple(found)
    elif microbatch not in stage.fwd_cache:
        has_meta = hasattr(stage, "get_outputs_meta")
        gradients = () if has_meta else [info.buffer for info in stage.grad_recv_info[microbatch]]
        metas = stage.get_outputs_meta() if has_meta else gradients
        zeros = (torch.zeros(x.shape, dtype=x.dtype, device=stage.device) for x in metas)
        stage.fwd_cache[microbatch] = tuple(zeros), []


def _as_planned(action: Any) -> Action:
    """The action of a plan, for traces and errors."""
    name, number = action.computation_type.value.removeprefix("WAIT_"), action.microbatch_index
    kind = Kind[name] if name in Kind.__members__ else Kind.F
    return Action(action.stage_index, kind, number if kind.has_microbatch else None)


class CallProgram(Program):
    """The calls of a step; gradients of earlier steps are set aside, and added at the end."""

    def __init__(self, calls: Calls, binding: Binding) -> None:
        super().__init__(binding, [*calls.instructions()], [calls.settle_all])
        self._calls = calls

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block for the run and what follows it."""
        stages = [*self._calls.stages.values()]
        for stage in stages:
            stage._begun = stage.native.grad_sync  # as the runner has done
        with reduced(self._calls.schedule, stages) as self._due:
            yield

    def forgo(self) -> Iterator[Exception]:
        """Take part in every message from now on; gradients are not reduced."""
        self._due.clear()
        return super().forgo()


def lowered(order: Order, schedule: Any, reduces: int) -> Any:
    """An order of computations with messages, and with actions for wrapped stages.

    ``reduces`` is after how many backwards a stage is reduced; 0 for never.
    """
    rows = {
        rank: torchs._add_unshard_reshard([*row], schedule._limits.max_active_stages)
        for rank, row in order.items()
    }
    if reduces:
        rows = {rank: torchs._add_reduce_grad(row, reduces) for rank, row in rows.items()}
    return torchs._add_send_recv(rows, schedule._rank_of, schedule._num_stages)


def leaves(row: Sequence[Any]) -> list[Any]:
    """The single actions of a row."""
    return [part for action in row if action is not None for part in _parts(action)]


def placement_of(order: Order) -> dict[int, int]:
    """The rank of each stage in an order.

    >>> placement_of({0: [torchs._Action.from_str("1F0")], 1: [torchs._Action.from_str("0F0")]})
    {1: 0, 0: 1}
    """
    return {
        part.stage_index: rank
        for rank, row in order.items()
        for part in leaves(row)
        if part.is_compute_op
    }
