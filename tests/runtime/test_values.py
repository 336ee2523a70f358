"""Any value crosses any boundary, under every schedule, with the plain model's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from taktline.transport.codec import register_container
from tests.runtime.cases import SCHEDULES
from tests.runtime.scenarios import (
    Batch,
    Scenario,
    assert_same,
    plan_for,
    run_gloo,
    run_local,
    run_plain,
)
from tests.workers import Workers

DIM = 6


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
    """Dicts in lists in dicts, with non-tensors among them, as one argument."""

    def forward(self, given: Any) -> Any:
        if not self.first:
            assert given["notes"] == {"stage": self.stage - 1, "empty": [], "none": None}
            left, (right,) = given["parts"]
            given = left + right["deep"]
        x = self.compute(given)
        if self.last:
            return x
        notes = {"stage": self.stage, "empty": [], "none": None}
        return {"parts": [x, ({"deep": x.square()},)], "notes": notes}


class NamedFields(Layer):
    """A named tuple of a tensor and another one."""

    def forward(self, given: Any) -> Any:
        if isinstance(given, Pair):
            given = given.hidden + given.rest.hidden
        x = self.compute(given)
        return x if self.last else Pair(x, Pair(x.exp(), "unused"))


class DataClass(Layer):
    """A dataclass, whose mask is left out every other time."""

    def forward(self, given: Any) -> Any:
        if isinstance(given, Hidden):
            assert given.name == "hidden"
            given = given.state if given.mask is None else given.state * given.mask
        x = self.compute(given)
        return x if self.last else Hidden(x, x > 0 if self.stage % 2 else None, "hidden")


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


def scenario(layer: type[Layer], batch: Any = plain_batch, **fields: Any) -> Scenario:
    return Scenario(lambda count: [layer(s, count) for s in range(count)], batch, **fields)


SCENARIOS = {
    "several": scenario(Many),
    "nested": scenario(Nested),
    "named tuple": scenario(NamedFields),
    "dataclass": scenario(DataClass),
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
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_local(schedule: str, name: str, ranks: int) -> None:
    plan = plan_for(schedule, ranks)
    assert_same(run_local(SCENARIOS[name], plan), run_plain(SCENARIOS[name], plan))


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gloo(workers: Workers, schedule: str, name: str) -> None:
    plan = plan_for(schedule, 4 if name in ("several", "twice", "no gradient in some") else 2)
    found = workers.run(run_gloo, __name__, name, plan, {}, ranks=plan.ranks)
    assert_same(found, run_plain(SCENARIOS[name], plan))


@pytest.mark.processes
@pytest.mark.parametrize("name", SCENARIOS)
def test_gloo_with_dynamic_shapes(workers: Workers, name: str) -> None:
    plan = plan_for("ScheduleZBVZeroBubble", 2)
    found = workers.run(run_gloo, __name__, name, plan, {"dynamic_shapes": True}, ranks=2)
    assert_same(found, run_plain(SCENARIOS[name], plan))
