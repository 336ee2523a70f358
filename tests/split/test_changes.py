"""What a forward keeps from call to call, and what it calls past torch's own functions."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.errors import PartitionError
from tests.split.training import made, require_plain_training

WIDTH, ROWS, PARTS = 4, 8, 4


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.set_up()

    def set_up(self) -> None:
        """Add what a model has of its own."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.embed(x)))


class Lists(Base):
    def set_up(self) -> None:
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x) * len(self.seen)


class Dicts(Base):
    def set_up(self) -> None:
        self.counts: dict[str, Any] = {"calls": {"all": 0}, "sizes": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"]["all"] += 1
        self.counts["sizes"].append(1)
        return super().forward(x) * self.counts["calls"]["all"] / len(self.counts["sizes"])


class Tuples(Base):
    def set_up(self) -> None:
        self.counts: tuple[Any, ...] = ([0], {"calls": 0})
        self.calls: tuple[int] = (0,)

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0][0] += 1
        self.counts[1]["calls"] += 1
        self.calls = (self.calls[0] + 1,)
        return super().forward(x) * self.counts[0][0] * self.counts[1]["calls"] / self.calls[0]


class Window(Base):
    def set_up(self) -> None:
        self.window = deque([1], maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.window.append(2)
        return super().forward(x) * sum(self.window)


class Counter:
    count = 0


class Object(Base):
    def set_up(self) -> None:
        self.counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.counter.count += 1
        return super().forward(x) * self.counter.count


class Tensors(Base):
    """Neither a buffer nor a parameter."""

    def set_up(self) -> None:
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        return super().forward(x) * (self.total / 2)


class Average(Base):
    """A buffer gets what an earlier stage has computed."""

    def set_up(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        self.average = 0.9 * self.get_buffer("average") + 0.1 * x.detach().mean(0)
        return self.head(self.run(x))


class Lazy(Base):
    """Made in the first call, as an attribute, a buffer and something that was not there."""

    other: Tensor

    def set_up(self) -> None:
        self.table = None
        self.register_buffer("other", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH) / WIDTH
            self.register_buffer("other", torch.ones(WIDTH), persistent=False)
        if not hasattr(self, "third"):
            self.third = torch.full((WIDTH,), 2.0)
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) + self.table * self.other * self.third
        return self.head(x)


class Last(Base):
    """The activations of a micro-batch are used by the next one, in one stage."""

    def set_up(self) -> None:
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x if self.last is None else x + self.last
        self.last = x.detach()
        return self.head(self.run(x))


class Collected(Base):
    """A list that each call empties, and that each stage adds to."""

    def set_up(self) -> None:
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.clear()
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            self.found.append(x)
        return self.head(x) + torch.stack(self.found).sum(0)


class Unread(Base):
    """Changed at the end, and not read before."""

    def set_up(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.calls += 1
        return x * self.calls


class Skewed(torch.autograd.Function):
    """Has gradients that only it knows."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        first, *others = tensors
        return 2 * first + sum(others)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0], *[3 * gradients[0]] * (len(ctx.needs_input_grad) - 1)


class Functions(Base):
    def forward(self, x: Tensor) -> Tensor:
        early = x = Skewed.apply(self.embed(x))
        for layer in self.layers:
            x = Skewed.apply(layer(Skewed.apply(x)), early)
        return self.head(x)


class Checkpointed(Base):
    """Checkpoints that are given what came from the first stage, before theirs begins."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        early = torch.tanh(x)
        for layer in self.layers:

            def block(x: Tensor, early: Tensor, layer: Any = layer) -> Tensor:
                return layer(x) + early

            x = checkpoint(block, x, early, use_reentrant=True)
        return self.head(x)


class Printed(Base):
    """Texts for people, in every stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            self.text = f"{x.mean():.3f} {x}"
        return self.head(x)


class Normed(Base):
    """Hooks compute the weights."""

    def set_up(self) -> None:
        for layer in self.layers:
            with pytest.warns(FutureWarning):
                nn.utils.weight_norm(layer)


MODELS = [
    *(Lists, Dicts, Tuples, Window, Object, Tensors, Average, Lazy, Last, Collected, Unread),
    *(Functions, Checkpointed, Normed, Printed),
]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("zbv", 2)])
@pytest.mark.parametrize("kind", MODELS)
def test_every_stage_is_as_far_as_the_model(
    kind: type[nn.Module], schedule: str, ranks: int
) -> None:
    torch.manual_seed(1)
    x, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    require_plain_training(kind, (x,), target, schedule=schedule, ranks=ranks, microbatches=PARTS)


class Late(Base):
    """Read at the beginning of the next call, which an earlier stage does."""

    def set_up(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * (1 + self.calls))
        self.calls += 1
        return x


class LateBuffer(Late):
    def set_up(self) -> None:
        self.register_buffer("calls", torch.zeros(()))


class LateList(Base):
    def set_up(self) -> None:
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * (1 + len(self.calls)))
        self.calls.append(1)
        return x


class LateTuple(Base):
    def set_up(self) -> None:
        self.calls: tuple[int] = (1,)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * self.calls[0])
        self.calls = (self.calls[0] + 1,)
        return x


class LateTensor(Base):
    def set_up(self) -> None:
        self.calls = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x + self.calls)
        self.calls = x.detach().mean(0)
        return x


@pytest.mark.parametrize("kind", [Late, LateBuffer, LateList, LateTuple, LateTensor])
def test_a_stage_must_not_read_what_a_later_one_changes(kind: type[nn.Module]) -> None:
    text = r"stage 0 reads 'calls', but the forward changes .* call of 'layers.2', .* elsewhere"
    with pytest.raises(PartitionError, match=text):
        tl.split.by_names(made(kind), ["layers.2"], example=(torch.zeros(2, WIDTH),))
    with pytest.raises(PartitionError, match=r"into 1 stage: .* \(with 'layers.0': stage 0 reads"):
        tl.split.auto(made(kind), 2, (torch.zeros(2, WIDTH),))


def test_a_run_without_data_leaves_nothing() -> None:
    model = made(Lists)
    with tl.Pipeline(model, example=(torch.zeros(2, WIDTH),), ranks=2, microbatches=2):
        assert model.seen == []
