"""Stages in the ways that code written for torch uses them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from taktline.compat.torch_pipelining import _utils as utils
from taktline.compat.torch_pipelining._utils import PipeliningMetadataError, PipeliningShapeError
from taktline.compat.torch_pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    _Action,
    _PipelineScheduleRuntime,
    _ScheduleForwardOnly,
)
from taktline.compat.torch_pipelining.stage import (
    PipelineStage,
    _PipelineStageBase,
    _RecvInfo,
)
from tests.compat.peer import SINCE_2_12
from tests.compat.programs import (
    BATCH,
    CPU,
    WIDTH,
    Program,
    Unsplit,
    loss_fn,
    make_batch,
    wrapped,
)
from tests.workers import Workers


def flatten(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.flatten()


def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)


def _mismatches(rank: int, group: dist.ProcessGroup) -> list[str]:
    program = Program(group, 2, [rank])
    stage = program.stages[0]
    stage._runtime_validate = True
    schedule = ScheduleGPipe(stage, 4)
    x, _ = make_batch()
    schedule.step(*([x] if rank == 0 else []))
    told: list[str] = []
    if rank == 0:
        # The other rank takes no part: what is wrong is seen before anything is sent.
        def refused(batch: Tensor, hook: Callable[..., Any] | None = None) -> None:
            handle = stage.submod.register_forward_hook(hook) if hook else None
            with pytest.raises(PipeliningShapeError) as caught:
                schedule.step(batch)
            told.append(str(caught.value))
            if handle:
                handle.remove()

        refused(torch.randn(BATCH + 1, WIDTH))
        refused(x.to(torch.int32))
        refused(x, flatten)
        refused(x, halve)
    return told


@SINCE_2_12  # before, with other words
@pytest.mark.processes
def test_mismatches_are_seen_on_the_rank_where_they_are(workers: Workers) -> None:
    told, _ = workers.run(_mismatches)
    assert issubclass(PipeliningMetadataError, RuntimeError)
    assert told == [
        "Stage 0 forward inputs[0]: shape mismatch: torch.Size([4, 8]) vs torch.Size([5, 8])",
        "Stage 0 forward inputs[0]: dtype mismatch: torch.float32 vs torch.int32",
        "Stage 0 forward outputs[0]: shape mismatch: torch.Size([4, 8]) vs torch.Size([32]); "
        "stride mismatch: (8, 1) vs (1,)",
        "Stage 0 forward outputs[0]: dtype mismatch: torch.float32 vs torch.bfloat16",
    ]


class Putting:
    """Weights whose gradients somebody computes by himself, later."""

    def __init__(self) -> None:
        self.calls = 0

    def builder(self) -> Callable[[], None]:
        def run() -> None:
            self.calls += 1

        return run


def _weights(rank: int, group: dist.ProcessGroup) -> list[int]:
    counts = []
    for validates in (False, True):
        for name, cls in (("full", ScheduleGPipe), ("split", ScheduleInterleavedZeroBubble)):
            state = Putting()
            program = Program(group, 2, [rank], dw_builder=state.builder)
            program.stages[0]._runtime_validate = validates
            single = name == "full"
            schedule = cls(program.stages[0] if single else program.stages, 4, loss_fn=loss_fn)
            program.train(schedule, 1)
            counts.append(state.calls)
    stage = Program(group, 2, [rank], dw_builder=lambda: None).stages[0]
    stage._has_backward = True
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        stage.backward_weight_one_chunk(bwd_chunk_id=0)
    return counts


@pytest.mark.processes
def test_weights_by_a_function_of_ones_own(workers: Workers) -> None:
    assert workers.run(_weights) == [[4] * 4] * 2


def _memory(rank: int, group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    found = []
    for validates in (False, True):
        program = Program(group, 2, [rank])
        stage = program.stages[0]
        stage._runtime_validate = validates
        schedule = ScheduleGPipe(stage, 4, loss_fn=loss_fn)
        counts = [len(stage.output_chunks)]
        cases: tuple[dict[str, Any], ...] = ({}, {"return_outputs": False}, {})
        for options in cases:
            output, _ = program.step(schedule, **options)
            assert (output is None) is (rank == 0 or "return_outputs" in options)
            counts += [len(stage.fwd_cache), len(stage.output_chunks)]
        stage.clear_runtime_states()
        found.append((*counts, len(stage.output_chunks)))
    return found


@pytest.mark.processes
def test_outputs_are_kept_if_they_are_asked_for(workers: Workers) -> None:
    first, last = workers.run(_memory)
    assert first == [(0, 0, 0, 0, 0, 0, 0, 0)] * 2
    assert last == [(0, 0, 4, 0, 0, 0, 4, 0)] * 2


_BUFFERS = "buffer" in signature(_RecvInfo.__init__).parameters  # before torch 2.15


def _info(name: str, source: int | None) -> _RecvInfo:
    """What comes from a stage; None is the caller."""
    example = torch.empty(BATCH // 4, WIDTH, requires_grad=True)
    meta = None if source is None else utils.extract_tensor_meta(example)
    room = {"buffer": None if source is None else example.detach()} if _BUFFERS else {}
    return _RecvInfo(name, source, **room, tensor_meta=meta, is_root_arg=source is None)


class Derived(_PipelineStageBase):
    """A stage that somebody has written: it knows the shapes, and tells them to nobody."""

    def _infos(self) -> tuple[_RecvInfo, ...]:
        if self.is_first:
            return (_info("x", None),)
        return (_info("x", self.stage_index - 1),)

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, *rest: Any, **more: Any
    ) -> Any:
        self.args_recv_info = {m: self._infos() for m in range(num_microbatches)}
        self.act_send_info = {0: [] if self.is_last else [self.stage_index + 1]}

    def _prepare_backward_infra(self, num_microbatches: int, **more: Any) -> Any:
        self._setup_backward_recv_info(num_microbatches)

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[_RecvInfo, ...]:
        return tuple(_info("dx", goal[0]) for goal in act_send_info.values() if goal)


def _derived(rank: int, group: dist.ProcessGroup) -> None:
    for cls in (ScheduleGPipe, Schedule1F1B):
        program = Program(group, 2, [rank], stage_class=Derived)
        schedule = cls(program.stages[0], 4, loss_fn=loss_fn)
        program.train(schedule)
        assert not schedule._on_ours
    for cls in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        program = Program(group, 4, [rank, rank + 2], stage_class=Derived)
        program.train(cls(program.stages, 4, loss_fn=loss_fn))


@SINCE_2_12  # before, with other methods
@pytest.mark.processes
def test_a_stage_of_ones_own(workers: Workers) -> None:
    workers.run(_derived)


def _static(rank: int, group: dist.ProcessGroup) -> None:
    """Some stages are told their shapes, or all, or all but one; all agree what is known."""
    example = torch.empty(BATCH // 4, WIDTH)
    for told in ((), (0,), (0, 1)):
        for calls in (False, True):
            known: dict[str, Any] = {"input_args": example, "output_args": example}
            program = Program(group, 2, [rank], calls=calls, **(known if rank in told else {}))
            schedule = Schedule1F1B(program.stages[0], 4, loss_fn=loss_fn)
            program.train(schedule)
            assert schedule._on_ours is not calls
            mode = "STATIC" if told == (0, 1) else "DYNAMIC"
            assert program.stages[0]._inference_mode.name == mode


@SINCE_2_12  # before, either all stages get shapes or none
@pytest.mark.processes
def test_shapes_that_are_passed(workers: Workers) -> None:
    workers.run(_static)


def _forward_only(rank: int, group: dist.ProcessGroup) -> None:
    program = Program(group, 2, [rank])
    schedule = _ScheduleForwardOnly(program.stages[0], 4)
    x, _ = make_batch()
    for _ in range(2):
        output = schedule.step(*([x] if rank == 0 else []))
        if rank == 1:
            torch.testing.assert_close(output, Unsplit(program.reference).output.detach())


@pytest.mark.processes
def test_forward_only(workers: Workers) -> None:
    workers.run(_forward_only)


SCHEDULES = (
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cls", SCHEDULES)
@pytest.mark.usefixtures("fake_group")
def test_a_single_stage(cls: Any, compiled: bool) -> None:
    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
    unsplit = Unsplit(layers)
    module: Any = torch.compile(layers[0], backend="eager") if compiled else layers[0]
    stage = PipelineStage(module, 0, 1, "cpu")  # pyright: ignore[reportArgumentType]
    single = issubclass(cls, PipelineScheduleSingle)
    schedule = cls(stage if single else [stage], 2, loss_fn=loss_fn)
    x, target = make_batch()
    for _ in range(2):
        layers.zero_grad()
        losses: list[Tensor] = []
        output = schedule.step(x, target=target, losses=losses)
        torch.testing.assert_close(output, unsplit.output)
        torch.testing.assert_close(torch.stack(losses).mean(), unsplit.loss)
        unsplit.check({0: layers[0]})


@pytest.mark.usefixtures("fake_group")
def test_gradients_of_a_weight_in_two_stages_add_up_over_steps() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    stages = [PipelineStage(layer, index, 2, CPU) for index in range(2)]
    schedule = _PipelineScheduleRuntime(stages, 1, loss_fn=loss_fn)
    order = [_Action.from_str(text) for text in ("0F0", "1F0", "1B0", "0B0")]
    schedule._prepare_schedule_with_comms({0: order})
    stages[0].forward_one_chunk = stages[0].forward_one_chunk  # so it goes call by call
    x, target = make_batch()
    (expected,) = torch.autograd.grad(loss_fn(layer(layer(x)), target), layer.weight)
    for count in (1, 2, 3):
        schedule.step(x, target=target)
        torch.testing.assert_close(layer.weight.grad, count * expected)
    assert not schedule._on_ours


def test_a_mock_for_a_stage() -> None:
    stage = MagicMock(stage_index=0, num_stages=1, group_size=1, group_rank=0)
    stage.is_first = stage.is_last = True
    stage.device = CPU
    stage.output_chunks = [torch.ones(1), torch.zeros(1)]
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda output, target: output)
    output = schedule.step(torch.ones(2), target=torch.ones(2))
    assert output.tolist() == [1, 0]
    names = [name for name, _, _ in stage.method_calls if name.endswith("one_chunk")]
    assert names == ["forward_one_chunk", "backward_one_chunk"] * 2
    stage.perform_reduce_grad.assert_called_once_with(2)


@SINCE_2_12
@pytest.mark.usefixtures("fake_group")
def test_a_stage_finds_where_its_values_come_from_and_go_to() -> None:
    stage = PipelineStage(nn.Linear(4, 3), 0, 1, CPU)
    (output,) = stage._shape_inference((torch.ones(2, 4),))
    assert output.shape == (2, 3)
    (source,) = stage._create_act_recv_info()
    assert "root" in repr(source).lower()
    assert stage._create_act_send_info() == {0: []}


PART = BATCH // 4


def _shown(rank: int, group: dist.ProcessGroup) -> list[Any]:
    program = Program(group, 2, [rank])
    (stage,) = program.stages
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_fn)
    shown = []
    for call in ("eval", "step"):
        program.step(schedule, call)
        meta = stage._stage_meta
        assert schedule._on_ours
        assert [(tuple(x.shape), x.stride, x.dtype) for x in meta.inputs + meta.outputs] == [
            ((PART, WIDTH), (WIDTH, 1), torch.float32)
        ] * 2
        assert stage.get_outputs_meta() == meta.outputs
        grads = [
            None if side is None else side[0] for side in (meta.input_grads, meta.output_grads)
        ]
        shown.append((meta.inputs[0].requires_grad, [grad is not None for grad in grads]))
    return shown


@SINCE_2_12
@pytest.mark.processes
def test_stages_show_what_crosses_their_boundaries(workers: Workers) -> None:
    """As those of torch do, though it is the runtime that has found it out."""
    first, last = workers.run(_shown)
    assert first == [(False, [False, False]), (False, [False, True])]
    assert last == [(False, [False, False]), (True, [True, False])]


def _announced_wrongly(rank: int, group: dist.ProcessGroup) -> str:
    wrong = torch.zeros(PART + rank, WIDTH, requires_grad=True)
    program = Program(group, 2, [rank], input_args=wrong)
    wrapped(program.stages[0])
    with pytest.raises(PipeliningMetadataError, match="shape mismatch") as caught:
        program.step(ScheduleGPipe(program.stages[0], 4, loss_fn=loss_fn))
    return str(caught.value)


@SINCE_2_12
@pytest.mark.processes
def test_every_rank_raises_what_torch_raises_of_a_mismatch(workers: Workers) -> None:
    for told in workers.run(_announced_wrongly):
        assert told.startswith("rank 1: Stage 1 input[0]: shape mismatch: torch.Size([5, 8]) vs ")
