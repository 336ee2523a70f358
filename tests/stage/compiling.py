"""Compiled stages for tests: a cheap backend, and a comparison of the two kinds of backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn

from taktline.stage.compiled import Backward
from taktline.stage.split_backward import Pending, Splitter

COMPILER_WARNINGS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
"""Marks for tests that compile: the compiler's own warnings are no errors."""


def aot(where: str = "stage 0", fails: str = "") -> Callable[..., Any]:
    """A backend that compiles nothing, around the same backward: as exact as eager mode."""
    from torch._dynamo.backends.common import aot_autograd

    tensors: list[bool] = []

    def boxed(graph: fx.GraphModule) -> Any:
        def call(arguments: list[Any]) -> Any:
            taken = list(arguments)
            arguments.clear()
            return graph(*taken)

        vars(call)["_boxed_call"] = True
        return call

    def forward(graph: fx.GraphModule, example: Sequence[Any]) -> Any:
        tensors[:] = [isinstance(value, Tensor) for value in example]
        return boxed(graph)

    def part(graph: fx.GraphModule, example: Sequence[Any], takes: Sequence[int]) -> Any:
        if fails and None in list(cast("Any", graph.graph.output_node().args[0])):  # a half
            raise RuntimeError(fails)
        return boxed(graph)

    def backward(graph: fx.GraphModule, example: Sequence[Any]) -> Any:
        return Backward(graph, example, part, where=where, tensors=list(tensors))

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


def compiled(module: nn.Module, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    made = torch.compile(module, backend=aot(**options))
    assert isinstance(made, nn.Module)
    return made


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width)
    )


def run(
    module: nn.Module, inputs: Sequence[Tensor], *, split: bool
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of inputs and of weights; all I before all W."""
    splitter, weights = Splitter(), [p for p in module.parameters() if p.requires_grad]
    given = [x.clone().requires_grad_() for x in inputs]
    pending: list[Pending | None] = []
    outputs = [module(x) for x in given]
    for x, output in zip(given, outputs, strict=True):
        if split:
            gradient = [torch.ones_like(output)]
            pending.append(splitter.run_input([output], gradient, [x], weights))
        else:
            output.backward(torch.ones_like(output))
    for each in pending:
        if each is not None:
            each.run()
    return [x.grad for x in given], [p.grad for p in module.parameters()]


def assert_alike(module: nn.Module, inputs: Sequence[Tensor], **options: Any) -> None:
    other = copy.deepcopy(module)
    plain = run(compiled(other, **options), inputs, split=False)
    split = run(compiled(module, **options), inputs, split=True)
    for ours, theirs in zip(split[0] + split[1], plain[0] + plain[1], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs)


def weights_of(pending: Pending) -> list[Tensor]:
    """The weights whose gradients W computes."""
    found = [product.weight for product in pending._products]
    return [
        *found,
        *(weight for *_, run in pending._compiled for weight in cast("Any", run).args[-1]),
    ]


def computed_in_w(module: nn.Module, x: Tensor) -> list[str]:
    """The parameters whose gradients W computes, after a check of all gradients."""
    plain = copy.deepcopy(module)
    given = x.detach().clone().requires_grad_(x.is_floating_point())
    torch.manual_seed(0)
    plain(given).sum().backward()
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point())]
    torch.manual_seed(0)
    root = module(*inputs).sum()
    pending = Splitter().run_input(
        [root], [torch.tensor(1.0)], [y for y in inputs if y.requires_grad], [*named.values()]
    )
    assert pending is not None
    later = weights_of(pending)
    pending.run()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, cast("Any", theirs.grad))
    module.zero_grad()
    return [name for name, p in named.items() if any(p is weight for weight in later)]
