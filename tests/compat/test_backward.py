"""The backward of a stage that is run by calls, in two halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from taktline.compat.torch_pipelining.stage import PipelineStage
from tests.compat.programs import CPU


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


class _Net(nn.Module):
    """A stage made of the words that it is given, with all that makes a backward hard to split."""

    def __init__(self, words: list[str], outputs: str) -> None:
        super().__init__()
        self.words, self.outputs = words, outputs
        self.linear, self.again = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.wide, self.norm = nn.Linear(4, 8), nn.LayerNorm(4)
        self.scale, self.table = nn.Parameter(torch.randn(4)), nn.Embedding(3, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = x
        steps: dict[str, Any] = {
            "linear": lambda x: self.linear(x),
            "again": lambda x: self.again(x).relu(),
            "scale": lambda x: x * self.scale,
            "norm": lambda x: self.norm(x),
            "table": lambda x: x + self.table(torch.arange(3)),
            "gate": lambda x: torch.mul(*self.wide(x).chunk(2, -1)),
            "skip": lambda x: x + given,
            "product": lambda x: x @ (self.linear.weight * self.scale),
            "sum": lambda x: x @ (self.linear.weight + self.again.weight),
            "expanded": lambda x: x * self.again.weight.sum(0),
            "hook": lambda x: _hooked(x * 1),
            "checkpoint": lambda x: checkpoint(self.linear, x, use_reentrant=False),
        }
        for word in self.words:
            x = steps[word](x)
        more = {"one": (), "weights alone": (self.scale * 2,), "input": (given,), "two": (x * 2,)}
        return (x, *more[self.outputs])


_WORDS = (
    *("linear", "again", "scale", "norm", "table", "gate", "skip", "product", "checkpoint"),
    *("sum", "expanded", "hook"),
)
_words = st.lists(st.sampled_from(_WORDS), min_size=1, max_size=6)
_outputs = st.sampled_from(["one", "weights alone", "input", "two"])


def _hooked(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is doubled, which must happen once."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient * 2)
    return tensor


def _in_halves(net: Any, outputs: Any, gradients: Any, x: torch.Tensor) -> torch.Tensor | None:
    """I, which leaves products to W; then W. Returns the gradient of the input."""
    stage = PipelineStage(net, 1, 3, CPU)
    kwargs = {"stage_output": outputs, "output_grads": gradients, "input_values": [x]}
    (found,), groups = stage.backward_maybe_with_nosync("input", kwargs)
    stage.backward_maybe_with_nosync("weight", {"param_groups": groups})
    return found


@settings(max_examples=40)
@given(_words, _outputs, st.booleans())
def test_both_halves_are_the_whole(words: list[str], outputs: str, edges: bool) -> None:
    """For two micro-batches, whose gradients add up: what is added to is nobody else's memory."""
    net, expected_net = _Net(words, outputs), _Net(words, outputs)
    expected_net.load_state_dict(net.state_dict())
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        made = expected_net(x)
        gradients = [torch.randn_like(output) for output in made]
        pairs = [p for p in zip(made, gradients, strict=True) if p[0].requires_grad]
        torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
        expected_x, x.grad = x.grad, None
        given: Any = net(x)
        if edges and outputs != "input":  # as torch 2.15 passes outputs that were sent
            given = [torch.autograd.graph.get_gradient_edge(output) for output in given]
        torch.testing.assert_close(_in_halves(net, given, gradients, x), expected_x)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_net.get_parameter(name).grad)


def test_products_of_weights_are_left_to_the_second_half() -> None:
    net, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    stage = PipelineStage(net, 1, 3, CPU)
    kwargs = {"stage_output": [net(x).sum()], "output_grads": None, "input_values": [x]}
    _, groups = stage.backward_maybe_with_nosync("input", kwargs)
    assert net.weight.grad is None
    stage.backward_maybe_with_nosync("weight", {"param_groups": groups})
    assert net.weight.grad is not None
