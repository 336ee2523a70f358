"""Schedules that people derive from torch's: by an order, a file, functions, or a whole step."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from taktline.compat.torch_pipelining import schedules as compat
from taktline.compat.torch_pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _Action,
    _PipelineContext,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)
from taktline.errors import ScheduleError
from tests.compat.peer import DEFERS
from tests.compat.programs import Program, loss_fn, wrapped
from tests.plan.peer import StandIn
from tests.workers import Workers


def order(*rows: str) -> dict[int, list[_Action | None]]:
    """An order by rank; a dot is a rank that waits."""
    return {
        rank: [None if text == "." else _Action.from_str(text) for text in row.split()]
        for rank, row in enumerate(rows)
    }


class VShaped(PipelineScheduleMulti):
    """One micro-batch down and up; the two stages in the middle lie on one rank."""

    placed = ((0, 3), (1, 2))
    microbatches = 1
    rows = order("0F0 . . 3F0 3B0 . . 0B0", ". 1F0 2F0 . . 2B0 1B0 .")

    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any, scale_grads: bool) -> None:
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        self.pipeline_order = self.rows
        self._validate_and_set_stage_mapping(self.pipeline_order)


class Unbalanced(VShaped):
    """Two neighbours on the first rank, two on the second, and one more on the first."""

    placed = ((0, 1, 4), (2, 3))
    rows = order("0F0 1F0 . . 4F0 4B0 . . 1B0 0B0", ". . 2F0 3F0 . . 3B0 2B0 . .")


class WithW(VShaped):
    """The halves of the backward apart."""

    placed = ((0, 2), (1, 3))
    microbatches = 2
    rows = order(
        "0F0 0F1 2F0 2F1 . 2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1",
        ". 1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1",
    )


class Reordered(_PipelineScheduleRuntime):
    """All that it does is written down, messages too; nothing says when to reduce."""

    placed = ((0,), (1,))
    microbatches = 2

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline_order_with_comms = order(
            "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
        )


def _from_orders(rank: int, group: dist.ProcessGroup) -> None:
    for cls in (VShaped, Unbalanced, WithW, Reordered):
        for scale_grads in (True, False):
            program = Program(group, sum(map(len, cls.placed)), list(cls.placed[rank]))
            schedule = cls(
                program.stages, cls.microbatches, loss_fn=loss_fn, scale_grads=scale_grads
            )
            program.train(schedule)
            assert schedule._on_ours
            program.step(schedule, "eval")
            program.train(schedule, 1)


@pytest.mark.processes
def test_orders_of_classes(workers: Workers) -> None:
    workers.run(_from_orders)


def _from_files(rank: int, group: dist.ProcessGroup, folder: str) -> None:
    program = Program(group, 4, [rank, rank + 2])
    for number, cls in enumerate((ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)):
        first = cls(program.stages, 4, loss_fn=loss_fn)
        for form in ("compute_only", "compute_comms"):
            path = f"{folder}/{number}-{form}-{rank}.csv"
            first._dump_csv(path, format=form)
            second = _PipelineScheduleRuntime(program.stages, 4, loss_fn=loss_fn)
            second._load_csv(path, format=form)
            assert second.pipeline_order_with_comms == first.pipeline_order_with_comms
            program.train(second)
        if DEFERS:
            third = _PipelineScheduleRuntime(program.stages, 4, loss_fn=loss_fn, defer_pp_recv=True)
            third._prepare_schedule_with_comms(first.pipeline_order)
            assert third.pipeline_order_with_comms != first.pipeline_order_with_comms
            program.train(third)
        plain = PipelineScheduleMulti(program.stages, 4, loss_fn=loss_fn)
        plain._load_csv(f"{folder}/{number}-compute_only-{rank}.csv")
        program.train(plain)


@pytest.mark.processes
def test_files(workers: Workers, tmp_path: Path) -> None:
    workers.run(_from_files, str(tmp_path))


def run_forward(action: _Action, ctx: _PipelineContext) -> None:
    """What a program registers for FORWARD: the same as torch does, by its own calls."""
    schedule: Any = ctx.schedule_ref
    here = {stage.stage_index: stage for stage in schedule._stages}
    stage, microbatch = here[action.stage_index], action.microbatch_index
    assert microbatch is not None
    assert ctx.arg_mbs is not None
    assert ctx.kwarg_mbs is not None
    if not stage.is_first and action.stage_index - 1 not in here:
        _wait_batch_p2p(schedule.fwd_recv_ops.pop((action.stage_index, microbatch)))
    output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch])
    schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
    if action.stage_index + 1 in here:
        here[action.stage_index + 1].set_local_fwd_input(output, microbatch)


def run_backward(action: _Action, ctx: _PipelineContext) -> None:
    schedule: Any = ctx.schedule_ref
    here = {stage.stage_index: stage for stage in schedule._stages}
    stage, microbatch = here[action.stage_index], action.microbatch_index
    if not stage.is_last and action.stage_index + 1 not in here:
        _wait_batch_p2p(schedule.bwd_recv_ops.pop((action.stage_index, microbatch)))
    loss = schedule._maybe_get_loss(stage, microbatch)
    schedule.backward_counter[action.stage_index] += 1
    last = schedule.backward_counter[action.stage_index] == schedule._n_microbatches
    stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=last)
    if action.stage_index - 1 in here:
        before = here[action.stage_index - 1]
        before.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


def _with_functions(rank: int, group: dist.ProcessGroup) -> list[str]:
    calls: list[str] = []

    def noted(function: Any) -> Any:
        def call(action: _Action, ctx: _PipelineContext) -> None:
            calls.append(str(action))
            function(action, ctx)

        return call

    def overlap(action: _Action, ctx: _PipelineContext) -> None:
        assert action.sub_actions is not None
        forward, backward = action.sub_actions
        run_forward(forward, ctx)
        run_backward(backward, ctx)

    program = Program(group, 4, [rank, 3 - rank])
    schedule = ScheduleDualPipeV(program.stages, 4, loss_fn=loss_fn)
    program.train(schedule, 1)
    assert schedule._on_ours
    schedule.register_custom_function(FORWARD, noted(run_forward))
    schedule.register_custom_function(FULL_BACKWARD, noted(run_backward))
    schedule.register_custom_function(OVERLAP_F_B, noted(overlap))
    program.train(schedule, 1)
    assert not schedule._on_ours
    return calls


@pytest.mark.processes
def test_functions_for_actions(workers: Workers) -> None:
    first, second = workers.run(_with_functions)
    assert first[:4] == ["0F0", "0F1", "0F2", "3F0"]
    assert "(0F3;3B1)OVERLAP_F_B" in first
    assert "(2F2;1B0)OVERLAP_F_B" in second


# Since torch 2.12.
TAKES_TARGET = "target" in signature(PipelineScheduleSingle._initialize_stage).parameters


class ByHand(PipelineScheduleSingle):
    """A step that somebody has written, for two ranks: GPipe with the calls torch's has."""

    def _step_microbatches(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        assert arg_mbs is not None
        assert kwarg_mbs is not None
        target = [target_mbs[0] if target_mbs else None] * TAKES_TARGET
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0], *target)
        sends = []
        for m in range(self._n_microbatches):
            _wait_batch_p2p(compat._batch_p2p(self._stage.get_fwd_recv_ops(m), desc="fwd_recv"))
            output = self._stage.forward_one_chunk(m, arg_mbs[m], kwarg_mbs[m])
            sends += compat._sorted_batch_p2p(self._stage.get_fwd_send_ops(m)).values()
            self._maybe_compute_loss(self._stage, output, target_mbs, m)
        for m in range(self._n_microbatches if self._has_backward else 0):
            _wait_batch_p2p(compat._batch_p2p(self._stage.get_bwd_recv_ops(m)))
            loss = self._maybe_get_loss(self._stage, m)
            last = m == self._n_microbatches - 1
            self._stage.backward_one_chunk(m, loss=loss, last_backward=last)
            sends.append(compat._batch_p2p(self._stage.get_bwd_send_ops(m)))
        self._stage.scale_grads(self._n_microbatches if self.scale_grads else 1)
        self._update_losses(self._stage, losses)
        for work in sends:
            _wait_batch_p2p(work)


class NamedByHand(ByHand, Schedule1F1B):
    """The same in the place of a schedule that there is a plan for."""


def _by_hand(rank: int, group: dist.ProcessGroup) -> None:
    for cls in (ByHand, NamedByHand):
        for scale_grads in (True, False):
            program = Program(group, 2, [rank])
            schedule = cls(program.stages[0], 4, loss_fn=loss_fn, scale_grads=scale_grads)
            program.train(schedule)
            program.step(schedule, "eval")
            assert not schedule._on_ours


@pytest.mark.processes
def test_a_step_written_by_hand(workers: Workers) -> None:
    workers.run(_by_hand)


class Loud(Schedule1F1B):
    """Adds nothing that a step could notice."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name = "loud"


class Quiet(Schedule1F1B):
    """Changes what a loss is."""

    def _compute_loss(
        self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super()._compute_loss(output, target, loss_kwargs) * 2


def _who_runs_it(rank: int, group: dist.ProcessGroup) -> list[bool | None]:
    verdicts = []
    for cls in (Loud, Quiet):
        program = Program(group, 2, [rank])
        schedule = cls(program.stages[0], 4, loss_fn=loss_fn)
        _, losses = program.step(schedule)
        verdicts.append(schedule._on_ours)
        if losses:
            verdicts.append(bool(losses[0] > 0))
    # Only one rank has a stage that somebody has changed: all of them go call by call.
    program = Program(group, 2, [rank])
    calls: list[int] = []
    if rank == 0:
        stage = program.stages[0]
        forward = stage.forward_one_chunk
        stage.forward_one_chunk = lambda number, *a, **k: (
            calls.append(number),
            forward(number, *a, **k),
        )[1]
    schedule = Schedule1F1B(program.stages[0], 4, loss_fn=loss_fn)
    program.train(schedule, 1)
    return [*verdicts, schedule._on_ours, calls == ([0, 1, 2, 3] if rank == 0 else [])]


@pytest.mark.processes
def test_what_runs_on_our_own_runtime(workers: Workers) -> None:
    assert workers.run(_who_runs_it) == [
        [True, False, False, True],
        [True, True, False, True, False, True],
    ]


# Orders in which a rank has nothing to do.

ROWS = ("0F0 0F1 2F0 2F1 . 2B0 2B1 0B0 0B1", ". 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
PLACED = ((0, 2), (1, 3))


def _of_computations(stages: Any) -> Any:
    schedule = PipelineScheduleMulti(stages, 2, loss_fn=loss_fn)
    schedule.pipeline_order = order(*ROWS, ". . .")
    schedule._validate_and_set_stage_mapping(schedule.pipeline_order)
    return schedule


def _without_a_row(stages: Any) -> Any:
    schedule = PipelineScheduleMulti(stages, 2, loss_fn=loss_fn)
    schedule.pipeline_order = order(*ROWS)
    return schedule


def _of_messages(stages: Any) -> Any:
    schedule = _PipelineScheduleRuntime(stages, 2, loss_fn=loss_fn)
    schedule._prepare_schedule_with_comms(order(*ROWS, "."))
    assert schedule.pipeline_order_with_comms[2] == []
    return schedule


def _runs(rank: int, group: dist.ProcessGroup) -> list[str]:
    said: list[str] = []
    for make in (_of_computations, _without_a_row, _of_messages):
        # A stage says where the third rank computes, though it runs none.
        program = Program(group, 4, [*PLACED[rank]] if rank < 2 else [3])
        if rank == 2:
            program.modules, program.first, program.last = {}, False, False
        schedule = make(program.stages)
        for _ in range(2):
            program.train(schedule)
            program.step(schedule, "eval")
        assert schedule._on_ours
        for stage in program.stages:
            wrapped(stage)
        again = make(program.stages)
        with pytest.raises(ScheduleError, match="rank 2 has nothing to do in this order") as caught:
            program.step(again)
        said.append(str(caught.value))
    return said


@pytest.mark.processes
def test_a_pipeline_with_an_idle_rank(workers: Workers) -> None:
    first, *others = workers.run(_runs, ranks=3)
    assert others == [first, first]


@pytest.mark.parametrize("row", [[], [None], [None, None]])
def test_a_step_without_actions_calls_no_stage(row: list[None]) -> None:
    stage = StandIn(1, 3, 0, 1)
    schedule = PipelineScheduleMulti([stage], 1)
    schedule.pipeline_order = {0: row}
    schedule._initialize_stages = lambda *args, **kwargs: None
    schedule._step_microbatches()
    assert stage.calls == []


def test_messages_are_added_around_an_idle_rank() -> None:
    rows = order("0F0 0B0", "", "1F0 1B0")
    found = compat._add_send_recv(rows, {0: 0, 1: 2}.__getitem__, 2)
    assert {rank: [*map(str, row)] for rank, row in found.items()} == {
        0: ["0F0", "0SEND_F0", "0RECV_B0", "0B0"],
        1: [],
        2: ["1RECV_F0", "1F0", "1B0", "1SEND_B0"],
    }
