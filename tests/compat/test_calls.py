"""Steps that go call by call run on Taktline's runtime: its agreement, its errors, its memory."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from taktline.compat.torch_pipelining.schedules import (
    FORWARD,
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _Action,
)
from taktline.compat.torch_pipelining.stage import PipelineStage
from taktline.errors import BatchError, StageError
from tests.compat.peer import SINCE_2_12
from tests.compat.programs import CPU, WIDTH, Program, loss_fn, make_batch, wrapped
from tests.compat.test_custom_schedules import order, run_forward
from tests.compat.test_steps import make, placed
from tests.workers import Workers


class Derived(PipelineStage):
    """A stage that changes what it inherits."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward_one_chunk(*args, **kwargs)


@pytest.mark.parametrize("stage_class", [PipelineStage, Derived])
@pytest.mark.usefixtures("fake_group")
def test_a_step_leaves_nothing_to_be_collected(stage_class: Any) -> None:
    """A cycle would keep a batch and its activations until the collector happens to run."""
    stage = stage_class(nn.Linear(WIDTH, WIDTH), 0, 1, CPU)
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_fn)
    x, target = make_batch()
    schedule.step(x, target=target)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        schedule.step(x, target=target)
        assert schedule._on_ours is (stage_class is PipelineStage)
        gc.collect()
        assert [value for value in gc.garbage if isinstance(value, Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "pass arg_mbs or the whole batch, not both": (RuntimeError, {"arg_mbs": [()] * 4}),
    "losses must be a list but got a <class 'str'>": (TypeError, {"losses": "all"}),
    "smaller than num_chunks": (AssertionError, {"rows": 2}),
}


@pytest.mark.parametrize("text", REFUSED)
@pytest.mark.parametrize("calls", [False, True])
def test_what_a_step_refuses(fake_group: Any, calls: bool, text: str) -> None:
    program = Program(fake_group, 1, [0], calls=calls)
    schedule = ScheduleGPipe(program.stages[0], 4, loss_fn=loss_fn)
    kind, options = REFUSED[text]
    x, target = (value[: options.get("rows", 16)] for value in make_batch())
    given = {name: value for name, value in options.items() if name != "rows"}
    with pytest.raises(BatchError, match=text) as caught:
        schedule.step(x, target=target, **given)
    assert isinstance(caught.value, kind)


class Odd(Exception):
    pass


def _failing_function(rank: int, group: dist.ProcessGroup, bad: str) -> list[str]:
    """A function for an action fails; then the next step works, on the same group."""
    program = Program(group, 4, [rank, rank + 2])
    schedule = ScheduleInterleaved1F1B(program.stages, 4, loss_fn=loss_fn)
    told: list[str] = []

    def forward(action: _Action, context: Any) -> None:
        if str(action) == bad and not told:
            raise Odd("not today")
        run_forward(action, context)

    schedule.register_custom_function(FORWARD, forward)
    for number in range(2):
        try:
            program.train(schedule, 1)
            told.append(f"step {number} worked")
        except StageError as error:
            told.append(f"{isinstance(error, RuntimeError)} {error}")
    return told


@pytest.mark.processes
@pytest.mark.parametrize("bad", ["0F1", "1F0", "2F3", "3F3"])
def test_every_rank_hears_of_a_function_that_fails(workers: Workers, bad: str) -> None:
    stage, microbatch = int(bad[0]), int(bad[2])
    for first, second in workers.run(_failing_function, bad):
        where = f"rank {stage % 2}, stage {stage}, micro-batch {microbatch} ({bad})"
        assert first.startswith(f"True {where}: Odd: not today")
        assert second == "step 1 worked"


class Fussy(nn.Module):
    """Fails at first."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(WIDTH, WIDTH), calls

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left >= 0:
            raise Odd("not yet")
        return self.linear(x)


def _failing_at_first(rank: int, group: dist.ProcessGroup, bad: int, per_rank: int) -> list[str]:
    """While stages find out what they give; then the next step works, on the same group."""
    mine = [rank + 2 * number for number in range(per_rank)]
    stages = [
        Derived(Fussy(int(index == bad)), index, 2 * per_rank, CPU, group=group) for index in mine
    ]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=loss_fn)
    x, target = make_batch()
    last = {"target": target} if rank == 1 else {}
    told: list[str] = []
    for call in ("eval", "step", "step"):
        try:
            getattr(schedule, call)(*([x] if rank == 0 else []), **last)
            told.append(f"{call} worked")
        except RuntimeError as error:
            told.append(str(error))
    return told


@SINCE_2_12  # before, stages do not send each other what they find
@pytest.mark.processes
@pytest.mark.parametrize(("bad", "per_rank"), [(0, 1), (1, 1), (1, 2), (2, 2), (3, 2)])
def test_every_rank_hears_of_a_stage_that_fails_at_first(
    workers: Workers, bad: int, per_rank: int
) -> None:
    for first, *others in workers.run(_failing_at_first, bad, per_rank):
        assert f"rank {bad % 2}: " in first
        assert "Odd: not yet" in first
        assert others == ["step worked"] * 2


@pytest.mark.usefixtures("fake_group")
def test_buffers_do_not_move_while_shapes_are_found_out() -> None:
    """They, and the gradients of steps before, are those of the steps alone."""
    module = nn.BatchNorm1d(WIDTH)
    stage = PipelineStage(module, 0, 1, CPU)
    wrapped(stage)
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_fn)
    x, target = make_batch()
    schedule.step(x, target=target)
    assert module.num_batches_tracked == 2
    module.weight.grad = torch.ones(WIDTH)
    schedule.eval(x)
    assert torch.equal(module.weight.grad, torch.ones(WIDTH))


class Unplanned(PipelineScheduleMulti):
    """An order that cannot run: a backward without its forward."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline_order = order("0F0 0B0 0B1", "1F0 1B0 1F1 1B1")


def _unplanned(rank: int, group: dist.ProcessGroup) -> None:
    program = Program(group, 2, [rank])
    program.step(Unplanned(program.stages, 2, loss_fn=loss_fn))


@pytest.mark.processes
def test_an_order_that_cannot_run_is_refused_on_every_rank(workers: Workers) -> None:
    for error in workers.outcomes(_unplanned):
        assert isinstance(error, RuntimeError)
        assert "0F1" in str(error)


class Turned(nn.Module):
    """Gives values, and gets gradients, that do not lie in memory in order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mean: Tensor | float = 0.0) -> Any:
        value = self.linear(x + mean)
        return value.t().contiguous().t(), value.mean(-1, keepdim=True).expand_as(value)


def _turned(rank: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    layers = [Turned(), Turned()]
    stage = PipelineStage(layers[rank], rank, 2, CPU, group=group)
    wrapped(stage)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output[0] - target).sum())
    x, target = make_batch()
    schedule.step(*([x] if rank == 0 else []), target=target)
    assert not schedule._on_ours
    found = layers[rank].linear.weight.grad
    layers[rank].zero_grad()
    ((layers[1](*layers[0](x))[0] - target).sum() / 4).backward()
    torch.testing.assert_close(found, layers[rank].linear.weight.grad)


@SINCE_2_12  # before, torch refuses other strides than those of the first micro-batch
@pytest.mark.processes
def test_values_that_are_not_contiguous_cross(workers: Workers) -> None:
    workers.run(_turned)


def _sized(rank: int, group: dist.ProcessGroup, name: str) -> list[str]:
    """Steps of other sizes; then one in which micro-batches differ; then one that works again."""
    per_rank = 1 if name == "Schedule1F1B" else 2
    program = Program(group, 2 * per_rank, placed(name, rank, 2), calls=True)
    schedule = make(name, program, 4)
    told: list[str] = []
    for rows in (8, 16, 12, 9, 4):
        x, target = (value[:rows] for value in make_batch())
        batch, kwargs = [x] if program.first else [], {"target": target} if program.last else {}
        for module in program.modules.values():
            module.zero_grad()
        try:
            losses: list[Tensor] = []
            output = schedule.eval(*batch, losses=losses)
            assert losses == []
            schedule.step(*batch, **kwargs)
        except StageError as error:
            told.append(str(error))
            continue
        expected = copy.deepcopy(program.reference)
        result = x
        for layer in expected:
            result = layer(result)
        loss_fn(result, target).backward()
        if program.last:
            torch.testing.assert_close(output, result.detach())
        for index, module in program.modules.items():
            for mine, its in zip(module.parameters(), expected[index].parameters(), strict=True):
                torch.testing.assert_close(mine.grad, its.grad)
    return told


@pytest.mark.processes
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleDualPipeV"])
def test_batches_of_other_sizes(workers: Workers, name: str) -> None:
    for (text,) in workers.run(_sized, name):
        found = ("returns [(torch.float32, [2, 8])]", "expects [(torch.float32, [3, 8])]")
        earlier = ("expected torch.Size([3, 8])", "actual torch.Size([2, 8])")  # before 2.12
        assert "rank 0, stage 0, micro-batch 1" in text
        assert any(all(part in text for part in parts) for parts in (found, earlier))
