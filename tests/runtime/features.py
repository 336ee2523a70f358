"""Features that every schedule must bring through: models with them, for the grid."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.transport.codec import register_container
from tests.runtime.scenarios import Batch, Scenario

DIM = 6


# Values of every kind, across boundaries.


@register_container
class Pair(NamedTuple):
    hidden: Any
    rest: Any


@dataclass
class Hidden:
    """A dataclass that pytree knows; a field that is None is no leaf of it."""

    state: Any
    mask: Any = None
    name: Any = None


pytree.register_dataclass(Hidden)


class Layer(nn.Module):
    """One layer; ``first`` takes the batch, ``last`` gives a single tensor."""

    def __init__(self, stage: int, count: int) -> None:
        super().__init__()
        self.stage = stage
        self.first = stage == 0
        self.last = stage == count - 1
        self.linear = nn.Linear(DIM, DIM)

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Alone(Layer):
    """One tensor, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


class Many(Layer):
    """Several values of every kind as several arguments."""

    def forward(self, x: Tensor, *others: Any) -> Any:
        if others:
            y, index, mask, nothing, number, text, share = others
            assert (nothing, number, text, share) == (None, self.stage, f"to {self.stage}", 0.5)
            assert index.dtype == torch.int64
            assert mask.dtype == torch.bool
            x = torch.where(mask, x + y[:, index], x - y)
        x = self.compute(x)
        if self.last:
            return x
        index = torch.arange(DIM - 1, -1, -1, device=x.device)
        return x, x * 2, index, x > 0, None, self.stage + 1, f"to {self.stage + 1}", 0.5


class Nested(Layer):
    """Containers of every kind in each other, with non-tensors among them, as one argument."""

    def forward(self, given: Any) -> Any:
        if not self.first:
            notes = {"stage": self.stage - 1, "empty": [], "none": None}
            assert given["notes"] == notes
            left, (pair,), hidden = given["parts"]
            assert (type(pair), pair.rest.rest, hidden.name) == (Pair, "unused", "hidden")
            # Every other time, the mask is left out.
            mask = 1 if hidden.mask is None else hidden.mask
            given = left + pair.hidden["deep"] + pair.rest.hidden + hidden.state * mask
        x = self.compute(given)
        if self.last:
            return x
        pair = Pair({"deep": x.square()}, Pair(x.exp(), "unused"))
        hidden = Hidden(x, x > 0 if self.stage % 2 else None, "hidden")
        notes = {"stage": self.stage, "empty": [], "none": None}
        return {"parts": [x, (pair,), hidden], "notes": notes}


class Layouts(Layer):
    """Tensors with strides of their own, without elements, without dimensions, on and off."""

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        if others:
            turned, spread, empty, point, every_other = others
            assert (empty.shape, empty.numel(), point.shape) == ((x.shape[0], 0, 3), 0, ())
            assert torch.equal(spread, spread[:, :1].expand(-1, DIM))
            x = x + turned.T + spread * point + empty.sum()
            x = x + every_other.repeat_interleave(2, dim=1)
        x = self.compute(x)
        if self.last:
            return x
        spread = x[:, :1].expand(-1, DIM)
        return x, x.T, spread, x.new_empty(x.shape[0], 0, 3), x.mean(), x[:, ::2]


class LowPrecision(Layer):
    """Half precisions with gradients, an eighth without, and integers of several widths."""

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        if others:
            brain, half, eighth, *integers, complex_ = others
            x = x + brain.float() + half.float() + eighth.float() + complex_.real.float()
            for integer in integers:
                x = x + integer.float() * 0.01
        x = self.compute(x)
        if self.last:
            return x
        integers = (x.detach() * 50).to(torch.uint8), (x.detach() * 50).to(torch.int16)
        eighth = x.detach().to(torch.float8_e4m3fn)
        return x, x.bfloat16(), x.half(), eighth, *integers, x.to(torch.complex128)


class Twice(Layer):
    """One tensor returned two times, and one that came in."""

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        if others:
            same, before = others
            x = x + 2 * same + 3 * before
        y = self.compute(x)
        return y if self.last else (y, y, x)


class Passes(Layer):
    """Every other stage hands on what it gets, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.stage % 2 and not self.last else self.compute(x)


class SomeBatches(Layer):
    """A branch, which gets no gradient where the batch says so: in all, some or no micro-batches.

    The weight of the branch then has none, as in the plain model.
    """

    def __init__(self, stage: int, count: int) -> None:
        super().__init__(stage, count)
        self.branch = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        if others:
            side, used = others
            x = x + side if used.any() else x
        else:
            used = x[:, 0] > 0
        y = self.compute(x)
        return y if self.last else (y, self.branch(y), used)


class Frozen(Layer):
    """No gradients in the first half; then a tensor with and one without."""

    def __init__(self, stage: int, count: int) -> None:
        super().__init__(stage, count)
        self.requires_grad_(stage >= count // 2)

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        if others:
            x = x + others[0]
        y = self.compute(x)
        return y if self.last else (y, y.detach())


class Keywords(Layer):
    """Keyword arguments on every stage: a tensor that is cut, and a number."""

    def forward(self, x: Tensor, *, scale: Tensor, power: int) -> Tensor:
        return self.compute(x * scale).pow(power)


class Normed(Layer):
    """Batch norm, whose running statistics each micro-batch changes once."""

    def __init__(self, stage: int, count: int) -> None:
        super().__init__(stage, count)
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.compute(x))


def plain_batch(number: int, size: int) -> Batch:
    return (torch.randn(size, DIM),), {}, torch.randn(size, DIM)


def keyword_batch(number: int, size: int) -> Batch:
    args, _, target = plain_batch(number, size)
    return args, {"scale": torch.rand(size, 1), "power": 3}, target


def some_batch(number: int, size: int) -> Batch:
    """The branches count in no micro-batch, in some, in all, in some of an uneven batch."""
    x = torch.randn(size, DIM)
    x[:, 0] = -1.0
    x[: (0, 0, size // 2, size, size - 2)[number], 0] = 1.0
    return (x,), {}, torch.randn(size, DIM)


def scenario(
    layer: Any, batch: Any = plain_batch, *, checkpointed: bool = False, **fields: Any
) -> Scenario:
    options = {"checkpointed": True} if checkpointed else {}
    return Scenario(lambda n: [layer(s, n, **options) for s in range(n)], batch, **fields)


# Losses from any stage.


class Experts(nn.Module):
    """A mixture of two experts, which adds how unevenly they are used to the loss."""

    def __init__(self, stage: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.stage = stage
        self.checkpointed = checkpointed
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        tl.add_loss(0.1 * (self.stage + 1) * shares.mean(0).square().sum())
        if self.stage == 1:  # two in one forward, of which one has no gradient
            tl.add_loss(shares.detach().max().reshape(1))
        left, right = (shares[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))
        return torch.tanh(left + right)


class OnlyThere(Experts):
    """A model in which one stage alone adds something."""

    def _compute(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            return super()._compute(x)
        return torch.tanh(self.experts[0](x))


def smoothed(output: Tensor, target: Tensor, *, beta: float, weight: Tensor) -> Tensor:
    return (F.smooth_l1_loss(output, target, beta=beta, reduction="none") * weight).mean()


CLASSES, IGNORED = 5, -100


def tokens(number: int, size: int) -> Batch:
    """One class a token, of which most are ignored; all of them in the first micro-batch."""
    target = torch.randint(CLASSES, (size, 7))
    target[torch.rand(size, 7) < 0.6] = IGNORED
    target[: -(-size // 4)] = IGNORED
    target[-1] = 1
    return (torch.randn(size, 7, DIM),), {}, target


def classifier(count: int) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(count)]
    layers[-1] = nn.Linear(DIM, CLASSES)
    return layers


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def count_tokens(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


# Skips.


WIDTH = 4


class Down(nn.Module):
    """A level of a U-Net: puts what it sees at its resolution, and halves that."""

    def __init__(self, level: int, channels: int) -> None:
        super().__init__()
        self.level = level
        self.block = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.block(x)))
        tl.skip.put(f"level {self.level}", x)
        return F.avg_pool2d(x, 2)


class Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.block(x))


class Up(nn.Module):
    """The way back: doubles the resolution, and joins what was put there."""

    def __init__(self, level: int, channels: int) -> None:
        super().__init__()
        self.level = level
        self.block = nn.Conv2d(2 * channels, channels // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2)
        x = torch.cat([x, tl.skip.get(f"level {self.level}")], dim=1)
        return F.silu(self.block(x))


def unet(stages: int) -> list[nn.Module]:
    """A U-Net of three levels, cut into so many stages."""
    levels = 3
    layers: list[nn.Module] = [Down(i, WIDTH * 2**i) for i in range(levels)]
    layers.append(Middle(WIDTH * 2**levels))
    layers += [Up(i, WIDTH * 2 ** (i + 1)) for i in reversed(range(levels))]
    layers.append(nn.Conv2d(WIDTH, WIDTH, 1))
    bounds = [round(i * len(layers) / stages) for i in range(stages + 1)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(bounds)]


def images(number: int, size: int) -> Batch:
    return (torch.randn(size, WIDTH, 8, 8),), {}, torch.randn(size, WIDTH, 8, 8)


class Shared(nn.Module):
    """Every stage uses what the first one puts, positions and a mask among it, and adds to it."""

    def __init__(self, stage: int, count: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.stage = stage
        self.linear = nn.Linear(6, 6)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            tl.skip.put("origin", x @ self.linear.weight)
            tl.skip.put("positions", torch.arange(x.shape[0], device=x.device))
            tl.skip.put("running", x.sum(1, keepdim=True) + self.linear.bias.sum())
        running = tl.skip.get("running")
        tl.skip.put("running", running * 0.5)
        x = x + tl.skip.get("running")
        if self.checkpointed:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        x = x + tl.skip.get("origin") + tl.skip.get("positions")[:, None]
        tl.skip.put(f"made by {self.stage}", torch.sin(x))
        x = x * tl.skip.get(f"made by {self.stage}")
        return torch.tanh(self.linear(x))


class Jump(Shared):
    """Only the last stage gets what the first one puts; the ones between hand it on."""

    def __init__(self, stage: int, count: int) -> None:
        super().__init__(stage, count)
        self.last = stage == count - 1

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            tl.skip.put("far", x @ self.linear.weight)
        if self.last:
            x = x * tl.skip.get("far")
        return torch.tanh(self.linear(x))


# Shapes that depend on values.


class Drops(nn.Module):
    """Each stage keeps some of the tokens it gets: which and how many, their values say."""

    def __init__(self, stage: int, count: int) -> None:
        super().__init__()
        self.stage = stage
        self.linear = nn.Linear(DIM, DIM)
        self.last = stage == count - 1

    def forward(self, x: Tensor, kept: int | None = None) -> Any:
        if self.stage == 0:
            x = x.flatten(0, 1)
        else:
            assert kept == len(x)
        x = torch.tanh(self.linear(x))
        x = x[x.detach().sum(1) > -1.0]
        return x.sum(0, keepdim=True) if self.last else (x, len(x))


def sequences(number: int, size: int) -> Batch:
    return (torch.randn(size, 5, DIM),), {}, torch.randn(size, DIM)


def loss_of_sums(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target.sum(0, keepdim=True))


def of(make: Any, **options: Any) -> Any:
    """A module for each stage."""
    return lambda count: [make(stage, **options) for stage in range(count)]


FEATURES = {
    "several": scenario(Many),
    "nested": scenario(Nested),
    "layouts": scenario(Layouts),
    "low precision": scenario(LowPrecision),
    "twice": scenario(Twice),
    "passed on": scenario(Passes),
    "no gradient in some": scenario(
        SomeBatches, some_batch, calls=(*[("eval", 8)], *[("step", 8)] * 3, ("step", 9))
    ),
    "no gradient in any": scenario(SomeBatches, some_batch, calls=(("step", 8), ("step", 8))),
    "frozen": scenario(Frozen),
    "keywords": scenario(Keywords, keyword_batch),
    "buffers": scenario(Normed, calls=(("step", 8), ("step", 8), ("step", 9))),
    "loss": Scenario(of(Experts), plain_batch),
    "loss, checkpointed": Scenario(of(Experts, checkpointed=True), plain_batch),
    "loss in one stage": Scenario(of(OnlyThere), plain_batch),
    "loss with keywords": Scenario(
        of(lambda _: nn.Linear(DIM, DIM)),
        plain_batch,
        smoothed,
        calls=(("step", 8), ("step", 8), ("step", 9)),
        options={"loss_kwargs": {"beta": 0.5, "weight": torch.arange(1.0, DIM + 1)}},
    ),
    "few rows": Scenario(
        of(Experts), plain_batch, calls=(*[("step", 3)] * 2, ("eval", 1), ("step", 1), ("step", 9))
    ),
    "tokens": Scenario(classifier, tokens, of_tokens, options={"loss_weights": count_tokens}),
    "weights": scenario(Alone, options={"loss_weights": [1, 0, 2.5, 4]}),
    "unscaled weights": scenario(
        Alone, options={"loss_weights": torch.tensor([0.5, 0, 2.5, 4])}, scale_grads=False
    ),
    "unet": Scenario(unet, images),
    "skip": scenario(Shared),
    "skip, checkpointed": scenario(Shared, checkpointed=True),
    "far skip": scenario(Jump),
    "dropped": scenario(Drops, sequences, loss=loss_of_sums),
}
INEXACT = ("loss", "loss, checkpointed", "loss in one stage", "few rows")
INEXACT += ("skip", "skip, checkpointed")
"""With several roots, or values that several stages use, the plain model adds up in another order
than stage by stage from the back."""
DYNAMIC = ("dropped",)
"""Whose shapes depend on values."""
