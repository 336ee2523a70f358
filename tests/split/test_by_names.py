"""Models cut by the names of their submodules."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline import skip
from tests.split.models import ResNet, ViT
from tests.split.training import gradients, require_same

SIZE, COUNT = 3, 4  # of a micro-batch, and how many of them
CPU = torch.device("cpu")


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.arange(count) % 5


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        nn.Linear(8, 5),
    )  # fmt: skip


def changing() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 8), nn.ReLU(inplace=True), nn.Linear(8, 8),
        nn.ReLU(inplace=True), nn.Linear(8, 5),
    )  # fmt: skip


MODELS: dict[str, tuple[Any, dict[int, list[str]]]] = {
    "sequential": (sequential, {2: ["2"], 4: ["2", "3.0", "4"]}),
    "vit": (ViT, {2: ["blocks.2"], 4: ["blocks.0", "blocks.2", "norm"]}),
    "resnet": (ResNet, {2: ["blocks.1"], 4: ["blocks.0", "blocks.2", "head"]}),
    "changing": (changing, {2: ["2"], 4: ["1", "2", "4"]}),
}


def make(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name][0]()


def train(
    rank: int, group: dist.ProcessGroup | None, pieces: tl.split.Pieces, schedule: str
) -> dict[str, Tensor]:
    """A step as one of several ranks; returns its gradients."""
    ranks = pieces.num_stages // (2 if schedule == "zbv" else 1)
    per_rank = pieces.num_stages // ranks
    plan = tl.build(schedule, ranks=ranks, microbatches=COUNT, stages_per_rank=per_rank)
    mine = [pieces.build_stage(stage, CPU, group) for stage in plan.placement.stages_of(rank)]
    x, target = images(SIZE * COUNT)
    tl.ScheduleFromPlan(mine, plan, F.cross_entropy).step(x, target=target)
    return gradients(*(stage.submod for stage in mine))


def plain(name: str) -> dict[str, Tensor]:
    """The same without stages."""
    model = make(name)
    x, target = images(SIZE * COUNT)
    for part, part_target in zip(x.chunk(COUNT), target.chunk(COUNT), strict=True):
        (F.cross_entropy(model(part), part_target) / COUNT).backward()
    return gradients(model)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(("stages", "shown"), [(2, True), (4, False)])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_gradients_of_the_model(
    name: str, stages: int, shown: bool, schedule: str
) -> None:
    example = (images(1)[0],) if shown else None
    pieces = tl.split.by_names(make(name), MODELS[name][1][stages], example=example)
    ranks = tl.local.run(
        lambda rank: train(rank, None, pieces, schedule), stages // (2 if schedule == "zbv" else 1)
    )
    require_same({n: g for rank in ranks for n, g in rank.items()}, plain(name))


@pytest.mark.parametrize("name", MODELS)
def test_together_the_pieces_are_the_model(name: str) -> None:
    model = make(name)
    x, _ = images(SIZE)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    pieces = tl.split.by_names(model, MODELS[name][1][4], example=(x,))
    assert {key: model.get_submodule(key) for key in modules} == modules
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for piece in pieces:
        assert not found.keys() & dict(piece.named_parameters()).keys()
        found.update(piece.named_parameters())
    assert found.keys() == parameters.keys()
    assert all(found[key] is parameters[key] for key in found)
    assert {key for piece in pieces for key in piece.state_dict()} == before.keys()
    for mode in (True, False):
        reference = copy.deepcopy(model).train(mode)
        for piece in pieces:
            piece.train(mode)
        assert torch.equal(pieces(x), reference(x))


def test_what_a_forward_has_made_goes_with_it() -> None:
    pieces = tl.split.by_names(ViT(), ["blocks.2"], example=(images(1)[0],))
    made: list[Any] = []
    hook = lambda module, args, output: made.append(weakref.ref(output))  # noqa: E731
    pieces[0].get_submodule("patch_embed").register_forward_hook(hook)
    with torch.no_grad():
        pieces[0](images(SIZE)[0])
    assert len(made) == 1
    assert made[0]() is None


class Down(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        skip.put("x", x)
        tl.add_loss(x.square().mean())
        return x


class Up(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + skip.get("x"))


def test_skips_and_losses_belong_to_the_stages_that_have_them() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Down(4, 4), nn.Linear(4, 4), Up(4, 4))

    x, target = torch.randn(4, 4), torch.randn(4, 4)

    def main(rank: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        stage = tl.split.by_names(model(), ["1", "2"], example=(x,)).build_stage(rank, CPU)
        aux: list[Tensor] = []
        tl.Schedule1F1B(stage, 2, F.mse_loss).step(x, target=target, aux_losses=aux)
        return gradients(stage.submod), aux

    plain = model()
    for part, part_target in zip(x.chunk(2), target.chunk(2), strict=True):
        with tl.collect_losses() as added:
            output = plain(part)
        ((F.mse_loss(output, part_target) + sum(added)) / 2).backward()
    ranks = tl.local.run(main, 3)
    assert [len(aux) for _, aux in ranks] == [2, 0, 0]
    for found, _ in ranks:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_what_is_never_called_is_part_of_the_state() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "spare": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["b"](self.parts["a"](x))

    pieces = tl.split.by_names(Model(), ["parts.b"], example=(torch.zeros(1, 4),))
    assert "parts.spare.weight" in pieces[0].state_dict()


def test_a_piece_can_be_copied() -> None:
    model, (x, _) = make("vit"), images(SIZE)
    pieces = tl.split.by_names(model, ["blocks.2"], example=(x,))
    copies = [copy.deepcopy(piece) for piece in pieces]
    assert torch.equal(copies[1](*copies[0](x)), model(x))
    copies[1](*copies[0](x)).sum().backward()
    assert gradients(model) == {}
    assert gradients(*copies).keys() == dict(model.named_parameters()).keys()


class Repeated(nn.Module):
    """Calls a layer as often as its argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        x = self.layers[0](x)
        for _ in range(int(count)):
            x = self.layers[1](x)
        return self.layers[2](x)


def test_stages_may_see_calls_in_another_order() -> None:
    model, x = Repeated(), torch.ones(1, 4)
    counts = [torch.tensor(count) for count in (1, 2, 3)]
    pieces = tl.split.by_names(model, ["layers.1"], example=(x, counts[0]))
    sent = [pieces[0](x, count) for count in counts]
    for place in (0, 2, 1):
        assert torch.equal(pieces[1](*sent[place]), model(x, counts[place]))
