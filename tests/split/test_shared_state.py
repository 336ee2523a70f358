"""Submodules to which the forward speaks otherwise than by arguments: no stage would hear it."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError

X = torch.linspace(-1, 1, 8).reshape(2, 4)
SCALE, TABLE, LOCAL = 1.0, {"scale": 1.0}, threading.local()
VARIABLE = ContextVar("scale", default=1.0)


class Block(nn.Linear):
    """Reads a number where the test says, which its model may change."""

    scale = 1.0

    def __init__(self, where: str, shared: Any) -> None:
        super().__init__(4, 4)
        self.where, self.shared = where, shared

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        match self.where:
            case "an attribute of the model":
                return x * self.shared[0].scale
            case "a config":
                return x * self.shared.scale
            case "a class":
                return x * type(self).scale
            case "a dict":
                return x * TABLE["scale"]
            case "a global variable":
                return x * SCALE
            case "a variable of the thread":
                return x * getattr(LOCAL, "scale", 1.0)
            case _:
                return x * VARIABLE.get()


class Model(nn.Module):
    """Sets a number before its last block, and sets it back."""

    def __init__(self, where: str, number: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where, self.number, self.scale = where, number, 1.0
        self.config = SimpleNamespace(scale=1.0)
        shared: Any = [self] if where == "an attribute of the model" else self.config
        self.blocks = nn.ModuleList(Block(where, shared) for _ in range(3))

    def set(self, number: float) -> None:
        global SCALE
        match self.where:
            case "an attribute of the model":
                self.scale = number
            case "a config":
                self.config.scale = number
            case "a class":
                Block.scale = number
            case "a dict":
                TABLE["scale"] = number
            case "a global variable":
                SCALE = number
            case "a variable of the thread":
                LOCAL.scale = number
            case _:
                VARIABLE.set(number)

    def forward(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            if at == 2:
                self.set(self.number)
            x = block(x)
        self.set(1.0)
        return x


PLACES = [
    ("an attribute of the model", r"shared\.0\.scale"),
    ("a config", r"shared\.scale"),
    ("a class", r"Block\.scale"),
    ("a dict", r"TABLE\.scale"),
    ("a global variable", "SCALE"),
    ("a variable of the thread", r"LOCAL\.scale"),
    ("a variable of the context", "VARIABLE"),
]


@pytest.mark.parametrize(("where", "name"), PLACES, ids=[where for where, _ in PLACES])
def test_a_number_that_a_block_reads(where: str, name: str) -> None:
    vars(LOCAL).clear()
    model = Model(where, 2.0)
    with pytest.raises(PartitionError, match=rf"py:\d+ calls 'blocks\.2', which uses '{name}'"):
        tl.split.by_names(model, ["blocks.1"], example=(X,))
    model.set(1.0)  # that of a class or a global variable is still the one of the forward

    model = Model(where, 1.0)  # sets it to what it is
    pieces = tl.split.by_names(model, ["blocks.1"], example=(X,))
    assert torch.equal(pieces(X), model(X))


class Counts(nn.Linear):
    """Counts its calls in what all blocks share."""

    calls: ClassVar = {"count": 0}

    def forward(self, input: Tensor) -> Tensor:
        self.calls["count"] += 1
        return super().forward(input)


def test_blocks_may_change_what_they_share() -> None:
    model = nn.Sequential(*[Counts(4, 4) for _ in range(3)])
    pieces = tl.split.by_names(model, ["1"], example=(X,))
    assert torch.equal(pieces(X), model(X))


class Switches(nn.Module):
    """Freezes a block for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.blocks[1].requires_grad_(False)
        x = self.blocks[1](x)
        self.blocks[1].requires_grad_(True)
        return self.blocks[2](x)


def test_a_block_that_is_frozen_for_a_while() -> None:
    with pytest.raises(PartitionError, match=r"calls 'blocks\.1', of which .* changed 'weight'"):
        tl.split.by_names(Switches(), ["blocks.2"], example=(X,))


class Borrows(nn.Linear):
    """Computes with the weight of another block, which is none of its own submodules."""

    def __init__(self, *others: nn.Linear) -> None:
        super().__init__(4, 4)
        self.others = others

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.others[0].weight


def test_a_weight_of_another_block() -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, Borrows(first), Borrows(first))
    with pytest.raises(PartitionError, match=r"computes in '1' with .* \(0\.weight\)"):
        tl.split.by_names(model, ["2"], example=(X,))
