"""Tied weights: whatever the schedule and the wrapper, they train as in the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import taktline as tl
from taktline.plan import Plan
from tests.runtime.parallel import mesh_of
from tests.runtime.scenarios import SCHEDULES, plan_for
from tests.workers import Workers

CPU = torch.device("cpu")
WORDS, WIDTH = 11, 6


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) * self.scale


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def make(stages: int, *, tied: bool = True) -> list[nn.Module]:
    """A model in stages, whose last one has the weights of the first one."""
    torch.manual_seed(7)
    embed, head = Embed(), Head()
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages - 2)]
    if tied:
        head.out.weight = embed.words.weight
    return [embed, *middle, head]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (8, 3), generator=generator)
    return tokens, tokens.roll(1, 0)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def ties(stages: int) -> list[tl.Tie]:
    return [tl.Tie({0: "words.weight", stages - 1: "out.weight"})]


def train(schedule: Any, modules: list[nn.Module], *, accumulates: bool = False) -> None:
    """Two steps whose gradients add up, an update, another step."""
    optimizer = torch.optim.SGD(nn.ModuleList(modules).parameters(), lr=0.5)

    def step(number: int) -> None:
        tokens, target = batch(number)
        schedule.step(tokens, target=target)

    if accumulates:
        with schedule.accumulate():
            step(0)
            step(1)
    else:
        step(0)
        step(1)
    optimizer.step()
    optimizer.zero_grad()
    step(2)


def plain(stages: int, scale: float = 0.25) -> dict[str, Tensor]:
    """What the gradients and the weights should be."""
    modules = make(stages)
    model = nn.Sequential(*modules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(3):
        tokens, target = batch(number)
        for x, y in zip(tokens.tensor_split(4), target.tensor_split(4), strict=True):
            (loss_fn(model(x), y) * scale).backward()
        if number == 1:
            optimizer.step()
            optimizer.zero_grad()
    return told(dict(enumerate(modules)))


def told(modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            name = name.removeprefix("module.")
            assert parameter.grad is not None, f"{stage}.{name}"
            found[f"{stage}.{name}"] = whole(parameter)
            found[f"{stage}.{name}.grad"] = whole(parameter.grad)
    return found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def pipelined(
    rank: int, group: dist.ProcessGroup | None, plan: Plan, how: str, accumulates: bool
) -> dict[str, Tensor]:
    """Train with each rank making the model anew, so that tied weights are copies."""
    stages = plan.stages
    modules = make(stages, tied=how != "declared")
    if how != "declared":
        tl.split.by_hand(modules)
    mine = {stage: modules[stage] for stage in plan.placement.stages_of(rank)}
    declared = ties(stages) if how == "declared" else ()
    made = [
        tl.PipelineStage(module, stage, stages, CPU, group=group, ties=declared)
        for stage, module in mine.items()
    ]
    train(
        tl.ScheduleFromPlan(made, plan, loss_fn=loss_fn),
        list(mine.values()),
        accumulates=accumulates,
    )
    return told(mine)


def gathered(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


def assert_like(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() >= expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, n=name: f"{n}: {text}")


def assert_tied(found: dict[str, Tensor], stages: int) -> None:
    last = f"{stages - 1}.out.weight"
    assert torch.equal(found["0.words.weight"], found[last])
    assert torch.equal(found["0.words.weight.grad"], found[f"{last}.grad"])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["found", "declared"])
def test_local_ranks(schedule: str, how: str) -> None:
    plan = plan_for(schedule, 3)
    parts = tl.local.run(lambda rank: pipelined(rank, None, plan, how, False), 3)
    found = gathered(parts)
    assert_like(found, plain(plan.stages))
    assert_tied(found, plan.stages)


@pytest.mark.processes
@pytest.mark.parametrize("accumulates", [False, True])
def test_processes(workers: Workers, accumulates: bool) -> None:
    plan = plan_for("Schedule1F1B", 4)
    found = gathered(workers.run(pipelined, plan, "found", accumulates, ranks=4))
    assert_like(found, plain(4))
    assert_tied(found, 4)


# In one process the stages may hold one parameter between them: then it must not count twice.
def test_local_ranks_that_share_the_parameter() -> None:
    modules = make(2)
    pieces = tl.split.by_hand(modules)

    def main(rank: int) -> None:
        schedule = tl.Schedule1F1B(pieces.build_stage(rank, CPU), 4, loss_fn=loss_fn)
        for number in range(2):
            tokens, target = batch(number)
            schedule.step(tokens, target=target)

    tl.local.run(main, 2)
    model = nn.Sequential(*make(2))
    for number in range(2):
        tokens, target = batch(number)
        for x, y in zip(tokens.tensor_split(4), target.tensor_split(4), strict=True):
            (loss_fn(model(x), y) * 0.25).backward()
    found = nn.Sequential(*modules).parameters()
    for mine, expected in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


@pytest.mark.processes
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_wrapped_stages(workers: Workers, schedule: str, wrapper: str, accumulates: bool) -> None:
    plan = plan_for(schedule, 2)
    parts = workers.run(_wrapped, plan, wrapper, accumulates, ranks=4)
    # Both replicas got the same batch, so that the average of their gradients is that of each.
    for replica in (0, 1):
        found = gathered(parts[replica::2])
        assert_like(found, plain(plan.stages))
        assert_tied(found, plan.stages)


def _wrapped(
    rank: int, group: dist.ProcessGroup, plan: Plan, wrapper: str, accumulates: bool
) -> dict[str, Tensor]:
    mesh = mesh_of(group)
    modules = list(tl.split.by_hand(make(plan.stages)))
    mine: dict[int, nn.Module] = {}
    for stage in plan.placement.stages_of(mesh.get_local_rank("pp")):
        module = modules[stage]
        if wrapper == "ddp":
            module = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
        else:
            fully_shard(module, mesh=mesh["dp"])
        mine[stage] = module
    made = [
        tl.PipelineStage(module, stage, plan.stages, CPU, group=mesh.get_group("pp"))
        for stage, module in mine.items()
    ]
    schedule = tl.ScheduleFromPlan(made, plan, loss_fn=loss_fn)
    train(schedule, list(mine.values()), accumulates=accumulates)
    return told(mine)


class Doubled(nn.Module):
    """The weight of the first stage once more, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.again(x)) @ self.again.weight


def three() -> list[nn.Module]:
    torch.manual_seed(3)
    embed, middle, head = Embed(), Doubled(), Head()
    middle.again.weight = head.out.weight = embed.words.weight
    return [embed, middle, head]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_in_three_stages(strict: bool, frozen: bool) -> None:
    tokens, target = batch(0)

    def main(rank: int) -> Tensor | None:
        pieces = tl.split.by_hand(three())
        pieces[0].get_parameter("words.weight").requires_grad_(not frozen)
        stage = pieces.build_stage(rank, CPU)
        tl.ScheduleGPipe(stage, 2, loss_fn=loss_fn).step(tokens, target=target)
        return stage.submod.get_parameter(dict(pieces.ties[0].uses)[rank]).grad

    found = tl.local.run(main, 3, strict=strict)
    if frozen:
        assert found == [None] * 3
        return
    model = nn.Sequential(*three())
    for x, y in zip(tokens.tensor_split(2), target.tensor_split(2), strict=True):
        (loss_fn(model(x), y) / 2).backward()
    for gradient in found:
        torch.testing.assert_close(gradient, model.get_parameter("0.words.weight").grad)


# Copies that begin apart would stay apart, however well their gradients are added up.
def test_copies_begin_with_the_values_of_the_first_stage() -> None:
    def main(rank: int) -> Tensor:
        module = make(2, tied=False)[rank]
        stage = tl.PipelineStage(module, rank, 2, CPU, ties=ties(2))
        tl.ScheduleGPipe(stage, 2).eval(batch(0)[0])
        return module.get_parameter(("words.weight", "out.weight")[rank])

    first, last = tl.local.run(main, 2)
    assert torch.equal(first, make(2)[0].get_parameter("words.weight"))
    assert torch.equal(first, last)


def test_sparse_gradients_of_an_embedding_are_added_up() -> None:
    tokens, target = batch(0)

    def main(rank: int) -> Tensor | None:
        modules = make(2)
        modules[0].words.sparse = True  # pyright: ignore
        stage = tl.split.by_hand(modules).build_stage(rank, CPU)
        tl.ScheduleGPipe(stage, 4, loss_fn=loss_fn).step(tokens, target=target)
        return stage.submod.get_parameter(("words.weight", "out.weight")[rank]).grad

    model = nn.Sequential(*make(2))
    for x, y in zip(tokens.tensor_split(4), target.tensor_split(4), strict=True):
        (loss_fn(model(x), y) / 4).backward()
    for gradient in tl.local.run(main, 2):
        torch.testing.assert_close(gradient, model.get_parameter("0.words.weight").grad)


# A step that fails must not lose the gradients of the steps before it.
def test_a_step_that_fails_leaves_earlier_gradients() -> None:
    tokens, target = batch(0)

    def main(rank: int) -> tuple[Tensor, Tensor]:
        stage = tl.split.by_hand(make(2)).build_stage(rank, CPU)
        schedule = tl.ScheduleGPipe(stage, 4, loss_fn=loss_fn)
        schedule.step(tokens, target=target)
        parameter = stage.submod.get_parameter(("words.weight", "out.weight")[rank])
        assert parameter.grad is not None
        before = parameter.grad.clone()
        with pytest.raises(tl.StageError, match="out of range"):
            schedule.step(tokens + WORDS, target=target)
        return before, parameter.grad

    for before, after in tl.local.run(main, 2):
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (
            ([tl.Tie({0: "words.weight", 1: "out.wait"})],) * 2,
            r"rank 1: stage 1 has no parameter out\.wait, which its ties name: words\.weight of "
            r"stage 0 = out\.wait of stage 1",
        ),
        (
            ([tl.Tie({0: "words.weight", 1: "out.weight"})], ()),
            r"words\.weight of stage 0 = out\.weight of stage 1: these are tied, but not in the "
            "ties= of stage 1; pass the same ties= to each of the stages",
        ),
        (
            ([tl.Tie({0: "scale", 1: "out.weight"})],) * 2,
            r"tied, but differ: float32\[6\] in stage 0, float32\[11, 6\] in stage 1",
        ),
    ],
)
def test_what_does_not_fit_together_raises_on_every_rank(
    declared: tuple[Any, ...], words: str
) -> None:
    def main(rank: int) -> None:
        module = make(2, tied=False)[rank]
        stage = tl.PipelineStage(module, rank, 2, CPU, ties=declared[rank])
        with pytest.raises(tl.MismatchError, match=words):
            tl.ScheduleGPipe(stage, 2).eval(batch(0)[0])

    tl.local.run(main, 2)


def test_a_tie_of_one_stage_is_refused() -> None:
    with pytest.raises(tl.MismatchError, match=r"in two stages or more, not \{0: 'words'\}"):
        tl.Tie({0: "words"})
