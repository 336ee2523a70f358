"""What a record could get wrong without a word: it is right, or refused with the user's line."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import taktline as tl
from taktline.errors import PartitionError
from tests.split.test_idioms import Net, X, pair, refused, require_same

HERE = r"test_never_silent\.py:\d+"


class Reads(nn.Linear):
    """Reads an object."""

    def forward(self, input: Tensor, given: Any = None, same: Any = None) -> Tensor:
        factor = 2 if same is None or same is given else 3
        return super().forward(input) * factor * given.mask


@dataclass(slots=True)
class Slots:
    x: Tensor
    depth: int = 0


class Slotted(nn.Linear):
    def forward(self, input: Any) -> Any:
        return Slots(super().forward(input.x), input.depth + 1)


def one_object_twice(self: Any, x: Tensor) -> Any:
    given = SimpleNamespace(mask=(x > 0).float())
    x = self.embed(x)
    for block in self.blocks:
        x = block(x, given, same=given)
    return x


def slots(self: Any, x: Tensor) -> Any:
    state = self.run(Slots(self.embed(x)))
    return state.x * state.depth


@pytest.mark.parametrize(
    ("body", "block"),
    [
        (one_object_twice, Reads),
        (slots, Slotted),
    ],
)
def test_objects_between_units(body: Any, block: Any) -> None:
    require_same(lambda: Net(body, pair(block)), X)


def test_an_object_that_refers_to_itself() -> None:
    def body(self: Any, x: Tensor) -> Any:
        made = SimpleNamespace(x=self.run(self.embed(x)))
        made.me = made
        return made

    refused(lambda: Net(body), r"SimpleNamespace refers to itself, which stages cannot do", X)


# What is right


def kernels(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    flash = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    y = x[None, None]
    y = F.scaled_dot_product_attention(y, y, y)[0, 0]
    torch.backends.cuda.enable_flash_sdp(flash)
    return self.run(y)


def default_type(self: Any, x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    ones = torch.ones(4)
    torch.set_default_dtype(before)
    return self.run(self.embed(x)) + ones


def sparse(self: Any, x: Tensor) -> Tensor:
    one = torch.eye(4).to_sparse()
    x = torch.sparse.mm(one, self.embed(x).t()).t()
    return torch.sparse.mm(one, self.run(x).t()).t()


def harmless_draw(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    return self.run(x) if random.random() < 1.0 else x


@pytest.mark.parametrize("body", [kernels, default_type, sparse, harmless_draw])
def test_as_the_plain_model(body: Any) -> None:
    require_same(lambda: Net(body), X)


# What is refused


class Notes(nn.Linear):
    """Adds what others have left for it."""

    note: Any = 0.0

    def forward(self, input: Tensor, call: Any = None) -> Tensor:
        output = super().forward(input) + self.note
        return output if call is None else call(output)


SHARED: ContextVar[Any] = ContextVar("SHARED")


class Shares(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + SHARED.get()


def notes_tensors(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    self.blocks[2].note = x
    return self.run(x)


def turns_off(self: Any, x: Tensor) -> Tensor:
    self.blocks[1].eval()
    x = self.run(self.embed(x))
    self.blocks[1].train()
    return x


def shares(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    SHARED.set(x * 2)
    return self.run(x)


def closes_over(self: Any, x: Tensor) -> Tensor:
    mask = (x > 0).float()
    x = self.embed(x)
    for block in self.blocks:
        x = block(x, lambda output: output * mask)
    return x


def registers(self: Any, x: Tensor) -> Tensor:
    handle = self.blocks[2].register_forward_hook(lambda _, __, output: output * 2)
    x = self.run(self.embed(x))
    handle.remove()
    return x


def other_parameters(self: Any, x: Tensor) -> Tensor:
    given = {"weight": self.blocks[1].weight * 2}
    x = torch.func.functional_call(self.blocks[0], given, (self.embed(x),))
    return self.blocks[2](self.blocks[1](x))


def seeds(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return self.run(self.embed(x) * torch.rand(4))


def chooses(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    x = x * random.choice([1.0, 2.0])
    return self.run(x)


def saves_others(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return self.run(self.embed(x))


def runs_backward(self: Any, x: Tensor) -> Tensor:
    x = self.run(self.embed(x))
    x.sum().backward(retain_graph=True)
    return x


def sets_data(self: Any, x: Tensor) -> Tensor:
    self.blocks[2].weight.data = self.blocks[2].weight.data * 0.5
    return self.run(self.embed(x))


def catches(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    try:
        x = x * 2 if x.sum() > 0 else x
    except Exception:
        x = x * 3
    return self.run(x)


def passes_a_module(self: Any, x: Tensor) -> Tensor:
    return self.blocks[0](self.embed(x), self.head)


def iterators(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = block(iter([x]))
    return x


TABLE = torch.zeros(4)


def changes_a_table(self: Any, x: Tensor) -> Tensor:
    TABLE.add_(1)
    return self.run(self.embed(x)) * TABLE


def puts_a_skip(self: Any, x: Tensor) -> Tensor:
    tl.skip.put("x", x)
    return self.run(self.embed(x)) + tl.skip.get("x")


def makes_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.embed(x)) + nn.Linear(4, 4)(x)


def moving_mean(self: Any, x: Tensor) -> Tensor:
    self.mean = 0.9 * getattr(self, "mean", torch.zeros(4)) + x.mean(0)
    return self.run(self.embed(x)) + self.mean


CALLS = r"test_idioms\.py:\d+ calls"
AFTER = HERE + r" comes after torch's random numbers were set"
EACH = HERE + r" does something else in each call"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (notes_tensors, CALLS + r" 'blocks\.2', of which the forward has changed 'note'"),
        (turns_off, CALLS + r" 'blocks\.1', of which the forward has changed 'training'"),
        (shares, HERE + r" computes in 'blocks\.0' .* \(mul \("),
        (closes_over, HERE + r" computes in 'blocks\.0' .* \(float \("),
        (registers, r"is a hook that changes"),
        (other_parameters, HERE + r" calls 'blocks\.0', of which the forward has changed 'weight'"),
        (seeds, AFTER),
        (chooses, EACH),
        (saves_others, HERE + r" lets autograd save other tensors"),
        (runs_backward, HERE + r" runs a backward in the forward"),
        (sets_data, HERE + r" sets an attribute of a tensor"),
        (catches, HERE + r": __bool__ needs the data"),
        (
            passes_a_module,
            HERE + r" passes on a submodule \(Linear\), which the stage of that call",
        ),
        (iterators, HERE + r": list_iterator is used up by a call"),
        (changes_a_table, HERE + r" changes a tensor that is neither a buffer nor an argument"),
        (makes_a_layer, HERE + r" makes a module or parameter; make it before, in the constructor"),
        (puts_a_skip, HERE + r" puts or gets a skip between submodules; use a variable"),
        (moving_mean, r"uses its attribute 'mean', and sets it for the next call"),
    ],
    ids=lambda each: getattr(each, "__name__", "text"),
)
def test_what_is_refused(body: Any, text: str) -> None:
    blocks = {shares: Shares, passes_a_module: Notes, closes_over: Notes, notes_tensors: Notes}
    refused(lambda: Net(body, pair(blocks.get(body, nn.Linear))), text, X)


class Mean(nn.Linear):
    """Also returns a number, which depends on data."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input), float(input.detach().mean())


class Maybe(nn.Linear):
    """Also returns what it got, if that is small."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input), input if input.detach().mean() > 0 else None


def numbers(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x, number = block(x)
        x = x if number is None else x * number
    return x


@pytest.mark.parametrize("block", [Mean, Maybe])
def test_numbers_that_units_return(block: Any) -> None:
    text = r"'blocks\.\d' \(.*" + HERE + r"\) returns .*; return a tensor"
    refused(lambda: Net(numbers, pair(block)), text, X)


class Collects(nn.Linear):
    """Adds to a list of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.losses: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        self.losses.append(input.square().mean())
        return super().forward(input)


def test_a_list_of_a_unit_that_the_forward_empties() -> None:
    def body(self: Any, x: Tensor) -> Any:
        x = self.run(self.embed(x))
        total = sum(loss for block in self.blocks for loss in block.losses)
        for block in self.blocks:
            block.losses.clear()
        return x, total

    refused(
        lambda: Net(body, Collects),
        r"'blocks\.0' .* has left no new tensor in its attributes 'losses\.0'",
        X,
    )


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[0]])
def test_an_argument_in_the_memory_of_one_that_is_changed(view: Callable[[Tensor], Tensor]) -> None:
    def body(self: Any, x: Tensor, other: Tensor) -> Tensor:
        x.add_(1)
        return self.run(self.embed(x.clone())) + other

    model, x = Net(body), X.clone()
    pieces = tl.split.by_names(model, ["blocks.1"], example=(x, view(x)))
    with pytest.raises(
        PartitionError, match=r"changes argument 0 .* are one tensor, or views of it; pass a copy"
    ):
        pieces(x, view(x))
    y = view(x).clone()
    assert torch.equal(pieces(x.clone(), y), Net(body)(x, y))


def test_an_argument_that_cannot_be_compared() -> None:
    import numpy as np

    model = Net(lambda self, x, factor: self.run(self.embed(x)) * torch.from_numpy(factor))
    with pytest.raises(PartitionError, match=r"cannot be compared .*ndarray.*; pass tensors"):
        tl.split.by_names(model, ["blocks.1"], example=(X, np.ones(4)))


def test_numbers_near_the_edges_are_drawn() -> None:
    """A branch that is hardly ever taken is taken in one of the first two runs."""
    drawn: list[float] = []

    def body(self: Any, x: Tensor) -> Tensor:
        drawn.append(random.random())
        return self.run(self.embed(x))

    tl.split.by_names(Net(body), ["blocks.1"], example=(X,))
    assert drawn[0] < 1e-6
    assert drawn[1] > 1 - 1e-6
