"""The schedule classes as a training script uses them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as peer
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import taktline as tl
from taktline.errors import BatchError, InvalidPlanError, ScheduleError
from taktline.plan import write
from taktline.runtime.schedule import ScheduleOptions
from tests.runtime.scenarios import SCHEDULES

CPU = torch.device("cpu")

NEWER = (
    "defer_pp_recv",
    "output_grads",
    "input_grads",
    "get_mesh",
    "finalize_gradients",
    "max_active_stages",
    "unshard_lookahead",
    "defer_reduce_grad_wait",
    "max_outstanding_sends",
)
"""Parameters that torch has added since 2.11; some are taken by the drop-in alone."""


def linear(seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(4, 4)


def gradient(module: nn.Linear) -> Tensor:
    assert module.weight.grad is not None
    return module.weight.grad


def alone(module: nn.Module | None = None, microbatches: int = 2, **options: Any) -> Any:
    """A schedule with one stage on one rank."""
    stage = tl.PipelineStage(module or linear(), 0, 1, CPU)
    options.setdefault("loss_fn", mse_loss)
    return tl.ScheduleGPipe(stage, microbatches, **options)


def test_a_stage_runs_the_module_that_it_has() -> None:
    """Programs are remembered, but with one they ran the module of the first step for ever."""
    schedule, x = alone(linear(0)), torch.ones(4, 4)
    for _ in range(2):
        schedule.step(x, target=x)
    other = schedule._stages[0].submod = linear(1)
    schedule.step(x, target=x)
    expected = linear(1)
    mse_loss(expected(x), x).backward()
    torch.testing.assert_close(gradient(other), gradient(expected))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("method", ["__init__", "step", "eval"])
def test_signatures_are_those_of_torch(name: str, method: str) -> None:
    ours = inspect.signature(getattr(getattr(tl, name), method)).parameters
    theirs = inspect.signature(getattr(getattr(peer, name), method)).parameters
    assert_offers(ours, theirs)


def assert_offers(ours: Any, theirs: Any) -> None:
    """The same parameters, kinds and defaults in the same order; ours may add keyword-only ones."""
    added = [p for p in ours.values() if p.name not in (*theirs, *NEWER)]
    if added and added[-1].name == "options":
        assert added.pop().annotation == "Unpack[ScheduleOptions]"
        assert not ScheduleOptions.__required_keys__
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added), added
    shared = [(p.name, p.kind, p.default) for p in ours.values() if p.name in theirs]
    expected = [p for p in theirs.values() if p.name in ours or p.name not in NEWER]
    assert shared == [(p.name, p.kind, p.default) for p in expected]


def test_the_signature_of_a_stage_is_that_of_torch() -> None:
    ours, theirs = inspect.signature(tl.PipelineStage), inspect.signature(peer.PipelineStage)
    assert_offers(ours.parameters, theirs.parameters)


def test_get_schedule_class() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    assert_offers(
        inspect.signature(tl.get_schedule_class).parameters,
        inspect.signature(get_schedule_class).parameters,
    )
    for name in SCHEDULES:
        short = name.removeprefix("Schedule")
        for spelled in (short, short.upper(), short.lower(), name):
            assert tl.get_schedule_class(spelled) is getattr(tl, name)
        assert get_schedule_class(short).__name__ == tl.get_schedule_class(short).__name__


def test_get_schedule_class_of_no_schedule() -> None:
    with pytest.raises(ScheduleError, match="no schedule is called '1F2B'; did you mean 1f1b"):
        tl.get_schedule_class("1F2B")
    with pytest.raises(ScheduleError, match="v_half has no class of its own; use ScheduleFromPlan"):
        tl.get_schedule_class("v_half")


@pytest.mark.parametrize("count", [0, -1, 1.5, "4"])
def test_an_invalid_number_of_microbatches(count: Any) -> None:
    with pytest.raises(ScheduleError, match="n_microbatches must be a whole number from 1 up, not"):
        alone(microbatches=count)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tl.ScheduleLoopedBFS([], 2),
        lambda: tl.ScheduleFromPlan([], tl.build("1f1b", ranks=1, microbatches=2), mse_loss),
    ],
)
def test_no_stages(make: Callable[[], Any]) -> None:
    with pytest.raises(tl.MismatchError) as caught:
        make()
    _, text = str(caught.value).split(" ", 1)
    assert text == (
        "needs the stages of this rank, at least one; a rank that holds none takes no part in the "
        "plan"
    )


def test_what_a_schedule_says_of_itself() -> None:
    assert repr(alone()) == "ScheduleGPipe(stages [0], 2 micro-batches)"
    assert alone().plan == tl.build("gpipe", ranks=1, microbatches=2)


def test_losses_fill_the_list_that_is_given() -> None:
    losses: Any = ["old"]
    output = alone().step(torch.ones(4, 4), target=torch.zeros(4, 4), losses=losses)
    assert len(losses) == 2
    assert torch.equal(losses[0], mse_loss(output[:2], torch.zeros(2, 4)))
    assert not losses[0].requires_grad
    untold: list[Tensor] = []
    assert alone().eval(torch.ones(4, 4), losses=untold).shape == (4, 4)
    assert untold == []  # without a target there are none
    with pytest.raises(BatchError, match="losses must be a list to fill, not tuple"):
        alone().step(torch.ones(4, 4), target=torch.zeros(4, 4), losses=())


def test_without_a_loss_a_step_is_forward_only() -> None:
    module = linear()
    output = alone(module, loss_fn=None).step(torch.ones(4, 4))
    torch.testing.assert_close(output, module(torch.ones(4, 4)).detach())
    assert not output.requires_grad
    assert module.weight.grad is None


class Scaled(nn.Linear):
    """Takes a keyword argument, which may be cut like the batch."""

    def forward(self, input: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        return super().forward(input) * scale


def scaled_stage(rank: int, scale: Tensor) -> Tensor | None:
    torch.manual_seed(rank)
    stage = tl.PipelineStage(Scaled(4, 4), rank, 2, CPU)
    return tl.Schedule1F1B(stage, 2).eval(torch.ones(4, 4), scale=scale * (rank + 1))


def test_keyword_arguments_are_for_the_stages_of_the_rank() -> None:
    scale = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    (_, output) = tl.local.run(scaled_stage, 2, scale)
    x = torch.ones(4, 4)
    for rank in (0, 1):
        torch.manual_seed(rank)
        x = Scaled(4, 4)(x, scale=scale * (rank + 1))
    torch.testing.assert_close(output, x.detach())


def test_micro_batches_that_are_cut_already() -> None:
    whole, ready = Scaled(4, 4), Scaled(4, 4)
    ready.load_state_dict(whole.state_dict())
    x, scale, target = torch.rand(4, 4), torch.rand(4, 1), torch.rand(4, 4)
    output = alone(whole).step(x, scale=scale, target=target)
    same = alone(ready).step(
        arg_mbs=[(x[:2],), (x[2:],)],
        kwarg_mbs=[{"scale": scale[:2]}, {"scale": scale[2:]}],
        target_mbs=[target[:2], target[2:]],
    )
    assert torch.equal(output, same)
    assert torch.equal(gradient(whole), gradient(ready))
    with pytest.raises(BatchError, match="arg_mbs has 1 micro-batch, but this batch has 2; pass 2"):
        alone(ready).step(arg_mbs=[(x,)], target=target)
    with pytest.raises(BatchError, match="pass arg_mbs or the whole batch, not both"):
        alone(ready).step(x, arg_mbs=[(x[:2],), (x[2:],)], target=target)
    with pytest.raises(BatchError, match="pass target_mbs or the whole batch, not both"):
        alone(ready).step(x, target=target, target_mbs=[target[:2], target[2:]])


def test_chunk_specs_and_a_merge_spec() -> None:
    """A batch in dimension 1 goes in, and comes out."""
    spec = tl.TensorChunkSpec(1)
    schedule = alone(
        nn.Tanh(), loss_fn=None, args_chunk_spec=(spec,), output_merge_spec=spec, microbatches=3
    )
    x = torch.rand(2, 6)
    assert torch.equal(schedule.eval(x), x.tanh())


def test_gradients_of_the_batch_itself() -> None:
    x, y = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    module, target = linear(), torch.zeros(4, 4)
    alone(module).step(x, target=target)
    mse_loss(module(y), target).backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_seeded_dropout_draws_anew_each_step_and_can_be_resumed() -> None:
    x, target = torch.ones(4, 4), torch.zeros(4, 4)
    module = nn.Sequential(linear(), nn.Dropout())
    schedule = alone(module, seed=3)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = (schedule.step(x, target=target) for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:2], first[2:])
    assert torch.equal(torch.get_rng_state(), state)
    resumed = alone(module, seed=3)
    resumed.steps = 1
    assert torch.equal(resumed.step(x, target=target), second)


def run_plan(rank: int, plan: Any) -> Tensor:
    """The gradient of one rank's layer under a plan."""
    module = linear(rank)
    stage = tl.PipelineStage(module, rank, 2, CPU)
    schedule = tl.ScheduleFromPlan([stage], plan, mse_loss)
    torch.manual_seed(5)
    x, target = torch.rand(4, 4), torch.rand(4, 4)
    for _ in range(2):
        schedule.step(x, target=target)
    schedule.eval(x)
    return gradient(module)


def test_schedules_from_plans_and_files(tmp_path: Path) -> None:
    plan = tl.build("zb_h1", ranks=2, microbatches=4)
    expected = tl.local.run(run_plan, 2, tl.build("gpipe", ranks=2, microbatches=4))
    sources: list[Any] = [plan, tl.lower(plan)]
    for name, content in (("plan.csv", plan), ("plan.json", plan), ("low.csv", tl.lower(plan))):
        write(content, tmp_path / name)
        sources.append(tmp_path / name)
    for source in sources:
        found = tl.local.run(run_plan, 2, source, strict=True)
        torch.testing.assert_close(found, expected)


def test_a_plan_that_is_not_valid() -> None:
    stage = tl.PipelineStage(linear(), 0, 1, CPU)
    plan = tl.Plan.from_actions([["0B0", "0F0"]])
    schedule = tl.ScheduleFromPlan([stage], plan, mse_loss)
    with pytest.raises(InvalidPlanError, match=r"\[order\] rank 0, position 0, 0B0: needs 0F0"):
        schedule.step(torch.ones(2, 4), target=torch.ones(2, 4))


DEFERRED = [
    # Each rank sends before it has posted the receive that the other one's send waits for.
    ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
    ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
]


def test_a_plan_that_needs_asynchronous_sends_runs_with_a_warning() -> None:
    plan = tl.Plan.from_actions(DEFERRED)
    assert tl.validate(plan)
    expected = tl.local.run(run_plan, 2, tl.build("gpipe", ranks=2, microbatches=2))
    with pytest.warns(UserWarning, match="can deadlock where a send waits until its receive"):
        found = tl.local.run(run_plan, 2, plan)
    torch.testing.assert_close(found, expected)
