"""The gradients of compiled stages, whose backward runs in halves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from taktline.stage.split_backward import Splitter
from tests.stage.compiling import COMPILER_WARNINGS, assert_alike, block, compiled, run

pytestmark = COMPILER_WARNINGS


class Scaled(nn.Module):
    """A gradient of a parameter is the gradient of the output itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.shift = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


def test_micro_batches_in_flight() -> None:
    assert_alike(block(), torch.randn(4, 3, 8).unbind())


def test_a_gradient_that_w_needs_is_not_added_to() -> None:
    assert_alike(Scaled(), torch.randn(4, 3, 4).unbind())


class Alike(nn.Module):
    """Weights that have the same gradient as others, as the output, or as the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.left, self.right = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.alike = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.alike(self, x)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x @ (self.one + self.other),
        lambda self, x: x @ (self.one + self.other.t()),
        lambda self, x: x @ self.one + (self.left + self.right),
        lambda self, x: x + self.left + torch.ones(3, 4) @ self.one,
        lambda self, x: x @ (self.one + torch.cat([self.left, self.right[:1]])),
        lambda self, x: x @ (self.one + torch.stack([self.other, self.other])[0]),
    ],
    ids=["in a sum", "turned", "not of products", "of the input", "in part", "chosen"],
)
def test_weights_with_the_same_gradient_do_not_share_it(
    forward: Callable[[Any, Tensor], Tensor],
) -> None:
    assert_alike(Alike(forward), torch.randn(4, 3, 4).unbind())


def test_a_hooked_weight_does_not_share_the_gradient_of_another() -> None:
    module = Alike(lambda self, x: x @ self.one + 2 * (self.left + self.right.view(12).view(3, 4)))
    module.right.register_hook(lambda gradient: None)
    inputs = torch.randn(3, 3, 4).unbind()
    _, (_, _, left, right) = run(compiled(module), inputs, split=True)
    assert left is not None
    assert right is not None
    assert torch.equal(left, torch.full((3, 4), 6.0))
    assert torch.equal(right, left)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x @ self.one + x @ self.other.sum(1, keepdim=True),
        lambda self, x: x @ (self.one + self.other.t()),
    ],
    ids=["expanded", "turned"],
)
def test_gradients_are_laid_out_like_their_weights(
    forward: Callable[[Any, Tensor], Tensor],
) -> None:
    module = Alike(forward)
    assert_alike(module, torch.randn(2, 3, 4).unbind())
    assert [p.grad.stride() for p in module.parameters() if p.grad is not None] == [(4, 1)] * 2


def test_autocast_does_not_reach_into_w() -> None:
    module = nn.Linear(4, 4)
    made, x = compiled(module), torch.randn(3, 4, requires_grad=True)
    output = made(x)
    with torch.autocast("cpu", torch.bfloat16):
        pending = Splitter().run_input([output], [x.detach()], [x], list(made.parameters()))
        assert pending is not None
        pending.run()
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, x.detach().t() @ x.detach())


def test_frozen_weights() -> None:
    module = block()
    next(module.parameters()).requires_grad_(False)
    assert_alike(module, torch.randn(2, 3, 8).unbind())


def test_a_complex_weight() -> None:
    module = Alike(lambda self, x: x @ self.one.conj())
    module.one = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    assert_alike(module, torch.randn(3, 2, 4, dtype=torch.complex64).unbind())
    assert module.one.grad is not None
    assert not module.one.grad.is_conj()  # operations on lists of tensors refuse such


class Products(TorchDispatchMode):
    """Counts the products of matrices, and the most of them that are in memory at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.most = 0
        self._alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten.mm.default:
            self._alive.add(result)
            self.count += 1
            self.most = max(self.most, len(self._alive))
        return result


def test_w_holds_one_gradient_at_a_time() -> None:
    module = nn.Sequential(block(), block())
    run(module, torch.randn(1, 3, 8).unbind(), split=True)  # gradients to add to
    x = torch.randn(3, 8, requires_grad=True)
    output = module(x)
    pending = Splitter().run_input(
        [output], [torch.ones_like(output)], [x], list(module.parameters())
    )
    assert pending is not None
    with Products() as products:
        pending.run()
    assert (products.count, products.most) == (4, 1)
