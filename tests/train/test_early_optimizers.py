"""Optimizers that were made before the pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import taktline as tl
from taktline.errors import MismatchError
from tests.workers import Workers

WORDS, WIDTH = 11, 4


class Language(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def words() -> Tensor:
    return torch.arange(24).reshape(4, 6) % WORDS


def made() -> nn.Module:
    torch.manual_seed(0)
    return Language()


def pipeline(model: nn.Module, **options: Any) -> tl.Pipeline:
    return tl.Pipeline(model, example=(words()[:2],), microbatches=2, loss_fn=loss_fn, **options)


def train(pipe: tl.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        pipe.step(words(), target=words())
        optimizer.step()
        optimizer.zero_grad()


def tied(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    with pipeline(model, mesh=mesh) as pipe:
        train(pipe, optimizer)
        return {name: p.detach() for name, p in pipe.named_parameters()}


@pytest.mark.processes
def test_copies_of_a_tied_weight_stay_the_same(workers: Workers) -> None:
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(5):
        loss_fn(model(words()), words()).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters(remove_duplicate=False))
    found = workers.run(tied)
    copies = [
        part[name]
        for part in found
        for name in part
        if name.endswith(("embed.weight", "head.weight"))
    ]
    assert len(copies) == 2
    assert torch.equal(*copies)
    for part in found:
        torch.testing.assert_close(
            part, {n: expected[n].detach() for n in part}, rtol=1e-3, atol=1e-4
        )


def sharded(rank: int, group: dist.ProcessGroup) -> str:
    model = made()
    before = torch.optim.SGD(model.parameters(), 0.1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    with pipeline(model, mesh=mesh, data_parallel="fsdp") as pipe:
        pipe.step(words(), target=words())
        with pytest.raises(MismatchError) as caught:
            before.step()
        train(pipe, torch.optim.SGD(pipe.parameters(), 0.1))
    return str(caught.value)


@pytest.mark.processes
def test_an_optimizer_of_parameters_that_were_sharded_raises(workers: Workers) -> None:
    for text in workers.run(sharded):
        assert "this SGD was made before the pipeline" in text
        assert "make it with pipe.parameters()" in text


def test_an_optimizer_of_parameters_without_data_trains_them() -> None:
    with torch.device("meta"):
        model = Language()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = made().state_dict()
    with pipeline(model, ranks=2, state_dict=state) as pipe:
        train(pipe, optimizer)
        assert not any(torch.equal(p, state[name]) for name, p in pipe.named_parameters())


def test_others_step_as_they_did() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pipeline(model, ranks=2) as pipe:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        train(pipe, optimizer)
        assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
