"""Stages do together what the model does: no submodule is left out, nothing is done twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import taktline as tl
from tests.split.transformers_models import LANGUAGES, texts
from tests.workers import Workers

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Noted(Chain):
    """Counts, in several ways."""

    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.count += 1
        self.total.add_(x.detach().mean())
        return x * (1 + 0.1 * self.count)


class Compiled(Chain):
    def __init__(self) -> None:
        super().__init__()
        compiled = [torch.compile(block, backend="eager") for block in self.blocks[:3]]
        for block in self.blocks[3:]:
            block.compile(backend="eager")
        self.blocks = nn.ModuleList([*compiled, *self.blocks[3:]])  # pyright: ignore[reportArgumentType]


X, TARGET = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()


def make(kind: type[Chain]) -> Chain:
    torch.manual_seed(1)
    return kind()


def pipeline(model: nn.Module, schedule: str, **where: Any) -> tl.Pipeline:
    return tl.Pipeline(
        model,
        example=(X[:2],),
        schedule=schedule,
        microbatches=4,
        loss_fn=F.mse_loss,
        **(where or {"ranks": 2}),
    )


def train_plainly(model: nn.Module) -> None:
    for x, target in zip(X.chunk(4), TARGET.chunk(4), strict=True):
        (F.mse_loss(model(x), target) / 4).backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile asks for it
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", [Noted, Compiled])
def test_steps_do_what_the_model_does(kind: type[Chain], schedule: str) -> None:
    model = make(kind)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, schedule)
    for _ in range(2):
        pipe.step(X, target=TARGET)
        train_plainly(reference)
    for name, parameter in reference.named_parameters():
        found = model.get_parameter(name).grad
        torch.testing.assert_close(found, parameter.grad, msg=lambda text, name=name: name + text)
    assert dict(model.named_buffers()) == dict(reference.named_buffers())
    state = pipe.state_dict(gathered=True)
    for name, value in reference.state_dict().items():
        assert torch.equal(state[name.replace("_orig_mod.", "")], value)


def train_over_processes(rank: int, group: dist.ProcessGroup, schedule: str) -> dict[str, Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    pipe = pipeline(make(Noted), schedule, mesh=mesh)
    pipe.step(X, target=TARGET)
    return pipe.state_dict(gathered=True)


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_counters_over_processes(workers: Workers, schedule: str) -> None:
    first, second = workers.run(train_over_processes, schedule)
    assert second == {}
    assert first["count"] == 4


def test_a_model_that_is_compiled_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = make(Chain)
    reference = copy.deepcopy(model)
    pipe = pipeline(torch.compile(model, backend="eager"), "1f1b")  # pyright: ignore[reportArgumentType]
    assert "compiled as a whole, but its stages are not" in caplog.text
    pipe.step(X, target=TARGET)
    train_plainly(reference)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def test_a_wrapper_that_hands_on_its_arguments() -> None:
    model: Any = LANGUAGES["llama"].make()
    model.config.use_cache = True
    words = texts(4)[0]
    pipe = tl.Pipeline(Wrapper(model), example=(words[:2],), microbatches=2, ranks=2)
    output = pipe.eval(words)
    assert output.past_key_values is None
    torch.testing.assert_close(output.logits, model(words).logits)
    assert model.config.use_cache


def test_the_norm_of_sparse_gradients() -> None:
    embed, head = nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
    pipe = tl.Pipeline([embed, head], microbatches=2, loss_fn=F.mse_loss, ranks=2)
    pipe.step(torch.tensor([1, 1, 2, 3]), target=TARGET[:4])
    dense = [p.grad.to_dense() for p in pipe.parameters() if p.grad is not None]
    expected = torch.cat([gradient.flatten() for gradient in dense]).norm()
    torch.testing.assert_close(pipe.grad_norm(), expected)
    pipe.clip_grad_norm_(0.1)
    torch.testing.assert_close(pipe.grad_norm(), torch.tensor(0.1), rtol=1e-4, atol=0)
