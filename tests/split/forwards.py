"""Models that differ in what their forwards do around the same layers, and changes of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import taktline as tl

WIDTH = 4
FLAG = True


class Chain(nn.Module):
    """Layers, one after the other; the other models differ in what is around them."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = 2.0
        self.flag = True
        self.order = list(range(layers))
        self.count = 0
        self.drop = nn.Dropout(0.5)
        self.offset = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Positions(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x) + torch.arange(x.shape[-1], device=x.device) * self.scale
        x = self.drop(x)
        for i in range(len(self.layers)):
            x = self.layers[i](x)
        return self.norm(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.inner(x))


class Residual(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return {"x": self.norm(x), "count": len(self.order)}


class Branches(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for i in self.order:
            x = self.layers[i](x)
            if self.flag:
                x = x * self.scale
        return self.norm(x), self.flag


class Conditions(Chain):
    """Conditions on attributes alone."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        if not self.flag:
            x = x * self.scale
        for layer in self.layers:
            if self.drop is not None:
                x = layer(x)
        if self.training:
            x = self.norm(x)
        return x


class Shapes(Chain):
    """Conditions on shapes, and on attributes together with them."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if x.shape[-1] * 2 > x.size(0) and self.flag else layer(2 * x)
            if x.shape[0] > 2 * self.scale or x.ndim == 5:
                x = x * self.scale
        return self.norm(x)


class Data(Chain):
    """A condition on data, which every stage has."""

    def forward(self, x: Tensor, positive: Tensor | None = None) -> Any:
        positive = x[0, 0] > 0
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if positive else layer(2 * x)
        return self.norm(x)


class Global(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if FLAG else layer(2 * x)
        return self.norm(x)


def applied(layer: nn.Module, x: Tensor) -> Tensor:
    return same(layer(x) if FLAG else layer(x * FACTOR))


def same(x: Tensor) -> Tensor:
    return x


def mirrored(x: Tensor) -> Tensor:
    return -x


FACTOR = 0.5
SAME = same


class Helpers(Chain):
    """Calls functions of its own, which are as plain as it is."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = applied(layer, x)
        return self.norm(x)


class Draws(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if torch.rand(()) < 0.5 else layer(x) * 2
        return self.norm(x)


class DrawsInPython(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x if random.random() < 0.5 else 2 * x)
        return self.norm(x)


class Counts(Chain):
    def forward(self, x: Tensor) -> Any:
        self.count += 1
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x * 2 if self.count % 3 == 0 else x)
        return self.norm(x)


class InPlace(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        x += 1
        for layer in self.layers:
            x = layer(x)
            x *= 2
        return self.norm(x)


class Noise(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            torch.rand(())
            x = layer(x)
        return self.norm(x)


class Dropped(Chain):
    """Draws between its layers, by a module that every stage has."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.norm(x)


class Number(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return super().forward(input), int(input.sum() > 0) if type(input) is Tensor else 0


class Numbers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Number(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x, number = layer(x)
            x = x + number
        return self.norm(x)


class Masked(nn.Linear):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Tensor, mask: Tensor, *, scale: float = 1.0
    ) -> Tensor:
        return super().forward(input) * mask * scale


class Masks(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        mask = (x > 0).float()
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, mask, scale=self.scale)
        return self.norm(x)


class Keywords(Masks):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(input=x, mask=x, scale=2.0)
        return self.norm(x)


class Memory(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        memory = self.embed(x)
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


class Checkpointed(Memory):
    def forward(self, x: Tensor) -> Any:
        memory = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, memory, use_reentrant=False)
        return self.norm(x)


class Offset(Chain):
    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) + self.offset
        return self.norm(x)


class Hooks(Chain):
    """Changes gradients on their way back."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 0.5)
        return self.norm(x)


class Batches(Chain):
    """Has buffers that change, and random numbers in its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
            for _ in range(6)
        )


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[5].weight = self.layers[0].weight


MODELS: list[Callable[[], nn.Module]] = [
    *(Chain, Positions, Inner, Residual, Branches, Global, Helpers, Draws, DrawsInPython),
    *(Counts, InPlace, Conditions, Shapes, Data, Noise, Dropped, Numbers, Masks, Keywords),
    *(Memory, Checkpointed, Offset, Hooks, Batches, Tied),
]


def split(model: nn.Module) -> tl.split.Pieces:
    path = "inner.layers" if isinstance(model, Inner) else "layers"
    cuts = [f"{path}.1", f"{path}.3", f"{path}.5"]
    return tl.split.by_names(model, cuts, example=(torch.zeros(3, WIDTH),))


def step(pieces: tl.split.Pieces, x: Tensor) -> tuple[Any, list[Tensor | None]]:
    """What the pieces return, and the gradients, with each stage on its own as in a pipeline."""
    for piece in pieces:
        piece.zero_grad()
    output = pieces(x)
    loss = sum(leaf.square().sum() for leaf in pytree.tree_leaves(output)
               if isinstance(leaf, Tensor))  # fmt: skip
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return output, [p.grad for piece in pieces for p in piece.parameters()]


def cold(pieces: tl.split.Pieces) -> tl.split.Pieces:
    """A copy that knows of no call."""
    return tl.split.by_hand(copy.deepcopy(list(pieces)))


def same_as_cold(pieces: tl.split.Pieces, x: Tensor) -> None:
    """Compare a step with that of pieces that know nothing, random numbers included."""
    expected = cold(pieces)
    states = torch.get_rng_state(), random.getstate()
    found, gradients = step(pieces, x)
    after = torch.get_rng_state(), random.getstate()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    wanted, wanted_gradients = step(expected, x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=0, atol=0)
    assert torch.equal(after[0], torch.get_rng_state())
    assert after[1] == random.getstate()
    for one, other in zip(pieces, expected, strict=True):
        torch.testing.assert_close(dict(one.named_buffers()), dict(other.named_buffers()))
        assert getattr(one, "count", 0) == getattr(other, "count", 0)
