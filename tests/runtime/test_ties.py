"""Tied weights: whatever the schedule and the wrapper, they train as in the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
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
from taktline.errors import TaktlineError
from taktline.plan import Plan
from taktline.runtime import ties as runtime_ties
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


def add_up(modules: list[nn.Module], *numbers: int, parts: int = 4) -> None:
    """Plain steps with these batches, each in some parts."""
    model = nn.Sequential(*modules)
    for number in numbers:
        tokens, target = batch(number)
        for x, y in zip(tokens.tensor_split(parts), target.tensor_split(parts), strict=True):
            (loss_fn(model(x), y) / parts).backward()


def plain(stages: int) -> dict[str, Tensor]:
    """What the gradients and the weights should be."""
    modules = make(stages)
    optimizer = torch.optim.SGD(nn.Sequential(*modules).parameters(), lr=0.5)
    add_up(modules, 0, 1)
    optimizer.step()
    optimizer.zero_grad()
    add_up(modules, 2)
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
    stages, mesh = plan.stages, None
    if group is not None and how in ("ddp", "fsdp"):
        mesh = mesh_of(group)
        rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    modules = make(stages, tied=how != "declared")
    if how != "declared":
        tl.split.by_hand(modules)
    mine: dict[int, nn.Module] = {}
    for stage in plan.placement.stages_of(rank):
        mine[stage] = modules[stage]
        if mesh is not None and how == "ddp":
            mine[stage] = DistributedDataParallel(mine[stage], process_group=mesh.get_group("dp"))
        elif mesh is not None:
            fully_shard(mine[stage], mesh=mesh["dp"])
    declared = ties(stages) if how == "declared" else ()
    made = [
        tl.PipelineStage(module, stage, stages, CPU, group=group, ties=declared)
        for stage, module in mine.items()
    ]
    schedule = tl.ScheduleFromPlan(made, plan, loss_fn=loss_fn)
    train(schedule, list(mine.values()), accumulates=accumulates)
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


WRAPPED = product(("Schedule1F1B", "ScheduleZBVZeroBubble"), ("ddp", "fsdp"))


@pytest.mark.processes
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(("schedule", "how"), [("Schedule1F1B", "found"), *WRAPPED])
def test_processes(workers: Workers, schedule: str, how: str, accumulates: bool) -> None:
    plan = plan_for(schedule, 4 if how == "found" else 2)
    parts = workers.run(pipelined, plan, how, accumulates, ranks=4)
    replicas = 4 // plan.ranks
    # All replicas got the same batch, so that the average of their gradients is that of each.
    for replica in range(replicas):
        found = gathered(parts[replica::replicas])
        assert_like(found, plain(plan.stages))
        assert_tied(found, plan.stages)


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
    add_up(expected := make(2), 0, 1)
    assert_like(told(dict(enumerate(modules))), told(dict(enumerate(expected))))


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
    add_up(expected := three(), 0, parts=2)
    for gradient in found:
        torch.testing.assert_close(gradient, expected[0].get_parameter("words.weight").grad)


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

    add_up(expected := make(2), 0)
    for gradient in tl.local.run(main, 2):
        torch.testing.assert_close(gradient, expected[0].get_parameter("words.weight").grad)


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


# Gradients that cannot be added up: one error on every rank, and nobody waits.

Results = Callable[..., list[Any]]


@pytest.fixture(params=["local", pytest.param("gloo", marks=pytest.mark.processes)])
def results(request: pytest.FixtureRequest) -> Results:
    """What a function returns on each rank; one that waits in vain ends with an error."""
    if request.param == "local":
        return lambda run, *args, ranks: tl.local.run(lambda r: run(r, None, *args), ranks)
    workers: Workers = request.getfixturevalue("workers")
    return lambda run, *args, ranks: workers.run(run, *args, ranks=ranks, timeout=30)


def _gradient(parameter: Any) -> Tensor | None:
    if getattr(parameter, "fails", False):
        raise RuntimeError("no memory for it")
    return _original(parameter)


_original = runtime_ties._gradient


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    runtime_ties._gradient = _gradient
    yield
    runtime_ties._gradient = _original


NAMES = {2: ("words.weight", "out.weight"), 3: ("words.weight", "again.weight", "out.weight")}


def scheduled(rank: int, group: dist.ProcessGroup | None, ranks: int) -> tuple[Any, nn.Module]:
    runtime_ties._gradient = _gradient  # in this process
    pieces = tl.split.by_hand(make(2) if ranks == 2 else three())
    stage = pieces.build_stage(rank, CPU, group)
    return tl.ScheduleGPipe(stage, 4, loss_fn=loss_fn), stage.submod


def error_of(run: Callable[[], object]) -> str:
    """What is raised, as the others shall hear it."""
    with pytest.raises(TaktlineError) as caught:
        run()
    return f"{type(caught.value).__name__}: {caught.value}"


def fails(rank: int, group: Any, accumulates: bool) -> str:
    """The last rank cannot add up gradients in a step, or at the end of a block of two."""
    schedule, module = scheduled(rank, group, 2)
    parameter: Any = module.get_parameter(NAMES[2][rank])
    parameter.fails = rank == 1
    tokens, target = batch(0)
    block = schedule.accumulate() if accumulates else nullcontext()
    with pytest.raises((RuntimeError, TaktlineError)) as caught, block:
        schedule.step(tokens, target=target)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("accumulates", [False, True], ids=["step", "block"])
def test_gradients_that_cannot_be_added_up(results: Results, accumulates: bool) -> None:
    first, second = results(fails, accumulates, ranks=2)
    assert second.endswith("no memory for it")
    # A local rank may catch its error, and end.
    assert "rank 1 has ended" in first or "no memory for it" in first


def leaves_accumulate(rank: int, group: Any, steps: int) -> str:
    """One rank leaves the block by an error of its own; the other may be in another step."""
    schedule, _ = scheduled(rank, group, 2)
    tokens, target = batch(0)
    try:
        with schedule.accumulate():
            schedule.step(tokens, target=target)
            if rank == 1:
                raise KeyError("my own")
            for _ in range(steps):
                schedule.step(tokens, target=target)
    except (KeyError, TaktlineError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# The other rank would add up what never comes.
def test_a_block_that_one_rank_leaves_by_an_error(results: Results) -> None:
    assert results(leaves_accumulate, 0, ranks=2) == [
        "MismatchError: rank 1 has left accumulate() by an error, so nothing was added up: "
        "KeyError: 'my own'",
        "KeyError: 'my own'",
    ]


def test_a_block_that_one_rank_leaves_while_the_other_goes_on(results: Results) -> None:
    first, second = results(leaves_accumulate, 1, ranks=2)
    assert first.startswith("MismatchError: ")
    assert "the end of accumulate()" in first
    assert second == "KeyError: 'my own'"


def fails_in_the_program(rank: int, group: Any) -> str:
    """The first rank fails in its last backward, when the other one has its gradients."""
    schedule, module = scheduled(rank, group, 2)
    seen: list[Tensor] = []

    def look(gradient: Tensor) -> None:
        seen.append(gradient)
        if len(seen) == 4:
            raise RuntimeError("out of luck")

    if rank == 0:
        module.get_parameter("scale").register_hook(look)
    tokens, target = batch(0)
    return error_of(lambda: schedule.step(tokens, target=target))


def test_a_rank_that_has_failed_before_takes_part(results: Results) -> None:
    for text in results(fails_in_the_program, ranks=2):
        assert text == (
            "StageError: rank 0, stage 0, micro-batch 3 (0B3): RuntimeError: out of luck"
        )


def loses_its_weight(rank: int, group: Any) -> str:
    schedule, module = scheduled(rank, group, 2)
    tokens, target = batch(0)
    schedule.step(tokens, target=target)
    if rank == 1:
        module.get_submodule("out").register_parameter("weight", None)
    return error_of(lambda: schedule.step(tokens, target=target))


def test_a_weight_that_is_gone(results: Results) -> None:
    for text in results(loses_its_weight, ranks=2):
        assert text.startswith(
            "MismatchError: rank 1: stage 1 has no parameter out.weight, which its ties name"
        )
