"""A model in the stages of a Pipe computes and trains as the model itself does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import taktline as tl
from tests.split.models import CASES, make
from tests.workers import Workers

SIZE, COUNT = 3, 4  # of a micro-batch, and how many of them
CPU = torch.device("cpu")
OFTEN = ("resnet", "rotated", "unet")
"""Quick ones; of the others, all combinations are in the matrix."""


def listed(cases: dict[str, Any], most: Any) -> list[Any]:
    """Each case with several parameters; those of the slow ones but the most telling are matrix."""
    return [
        pytest.param(
            name, each, marks=[] if name in OFTEN or each == most else [pytest.mark.matrix]
        )
        for name, several in cases.items()
        for each in several
    ]


both = pytest.mark.parametrize(
    ("name", "stages"), listed({name: case.cuts for name, case in CASES.items()}, 4)
)


def trace(name: str, stages: int, model: nn.Module) -> tl.Pipe:
    case = CASES[name]
    return tl.pipeline(model, (case.batch(SIZE)[0],), split_spec=case.cuts[stages])


@pytest.mark.sampled(3)
@pytest.mark.slow
@both
def test_pieces_one_after_the_other_are_the_module(name: str, stages: int) -> None:
    model = make(name)
    reference = copy.deepcopy(model)
    pipe = trace(name, stages, model)
    assert pipe.num_stages == stages
    x, _ = CASES[name].batch(SIZE)
    for mode in (True, False, True):
        pipe.train(mode)
        reference.train(mode)
        torch.manual_seed(0)
        output = pipe(x)
        torch.manual_seed(0)
        assert torch.equal(output, reference(x))
    for (key, buffer), (_, expected) in zip(
        model.named_buffers(), reference.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, expected), key


def train(rank: int, group: dist.ProcessGroup | None, name: str, schedule: str) -> dict[str, Any]:
    """A step as one rank, with a model of its own; returns its gradients."""
    torch.manual_seed(0)
    model = make(name)
    per_rank = 2 if schedule in ("zbv", "interleaved_zero_bubble") else 1
    plan = tl.build(schedule, ranks=2, microbatches=COUNT, stages_per_rank=per_rank)
    pipe = trace(name, plan.stages, model)
    mine = plan.placement.stages_of(rank)
    stages = [pipe.build_stage(stage, CPU, group) for stage in mine]
    runner = tl.ScheduleFromPlan(stages, plan, CASES[name].loss)
    x, target = CASES[name].batch(SIZE * COUNT)
    runner.step(*((x,) if 0 in mine else ()), target=target if plan.stages - 1 in mine else None)
    parameters = {n: p for stage in stages for n, p in stage.submod.named_parameters()}
    return {n: p.grad for n, p in parameters.items() if p.grad is not None}


def plain(name: str) -> dict[str, Tensor]:
    """The same without stages."""
    model = make(name)
    x, target = CASES[name].batch(SIZE * COUNT)
    for part, part_target in zip(x.chunk(COUNT), target.chunk(COUNT), strict=True):
        (CASES[name].loss(model(part), part_target) / COUNT).backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {n: p.grad for n, p in parameters.items() if p.grad is not None}


def check(name: str, ranks: list[dict[str, Tensor]]) -> None:
    expected = plain(name)
    if name == "rotated":
        # One weight in the model: on a rank with both stages, too, and on two ranks one each.
        head = next(rank for rank in ranks if "head.weight" in rank).pop("head.weight")
        tied = ranks[0].pop("embed.weight", head)
        tied = tied if tied is head or torch.equal(tied, head) else tied + head
        torch.testing.assert_close(tied, expected.pop("embed.weight"))
        expected.pop("head.weight")
    found = {n: gradient for rank in ranks for n, gradient in rank.items()}
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "schedule"),
    listed({name: ("1f1b", "zbv") for name in CASES if name != "unet"}, "zbv"),
)
def test_gradients_are_those_of_the_model(name: str, schedule: str) -> None:
    check(name, tl.local.run(lambda rank: train(rank, None, name, schedule), 2))


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_zero_bubble"])
def test_gradients_with_values_that_skip_over_stages(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)  # drawn in another order
    check("unet", tl.local.run(lambda rank: train(rank, None, "unet", schedule), 2))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["resnet", "rotated"])
def test_gradients_over_gloo(workers: Workers, name: str) -> None:
    check(name, workers.run(train, name, "zbv"))


def test_gradients_land_on_the_model() -> None:
    model, reference = make("rotated"), make("rotated")
    x, target = CASES["rotated"].batch(SIZE)
    pipe = trace("rotated", 4, model)
    loss = CASES["rotated"].loss
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for net, steps in ((pipe, optimizer), (reference, reference_optimizer)):
        loss(net(x), target).backward()
        steps.step()
    for (key, parameter), (_, expected) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), key


def test_a_tied_weight_in_one_process_gets_its_whole_gradient() -> None:
    model = make("rotated")
    pipe = trace("rotated", 2, model)
    x, target = CASES["rotated"].batch(SIZE * COUNT)

    def main(rank: int) -> None:
        stage = pipe.build_stage(rank, CPU)
        schedule = tl.Schedule1F1B(stage, COUNT, CASES["rotated"].loss)
        schedule.step(*((x,) if rank == 0 else ()), target=target)

    tl.local.run(main, 2)
    expected = plain("rotated")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None or name in expected:
            torch.testing.assert_close(parameter.grad, expected[name])
