"""The backward of a stage that is run by calls, in two halves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from taktline.compat.torch_pipelining.schedules import ScheduleInterleavedZeroBubble
from taktline.compat.torch_pipelining.stage import PipelineStage
from tests.compat.programs import CPU, wrapped


@pytest.fixture(autouse=True, scope="module")
def _group() -> Any:
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
            "checkpoint": lambda x: checkpoint(self.linear, x, use_reentrant=False),
        }
        for word in self.words:
            x = steps[word](x)
        more = {"one": (), "weights alone": (self.scale * 2,), "input": (given,), "two": (x * 2,)}
        return (x, *more[self.outputs])


_words = st.lists(
    st.sampled_from(
        ["linear", "again", "scale", "norm", "table", "gate", "skip", "product", "checkpoint"]
    ),
    min_size=1,
    max_size=6,
)
_outputs = st.sampled_from(["one", "weights alone", "input", "two"])


def _in_halves(net: Any, outputs: Any, gradients: Any, x: torch.Tensor) -> torch.Tensor | None:
    """I, which leaves products to W; then W. Returns the gradient of the input."""
    stage = PipelineStage(net, 1, 3, CPU)
    kwargs = {"stage_output": outputs, "output_grads": gradients, "input_values": [x]}
    (found,), groups = stage.backward_maybe_with_nosync("input", kwargs)
    stage.backward_maybe_with_nosync("weight", {"param_groups": groups})
    return found


@given(_words, _outputs, st.booleans())
def test_both_halves_are_the_whole(words: list[str], outputs: str, edges: bool) -> None:
    net = _Net(words, outputs)
    x = torch.randn(3, 4, requires_grad=True)
    gradients = [torch.randn_like(output) for output in net(x)]
    pairs = [p for p in zip(net(x), gradients, strict=True) if p[0].requires_grad]
    torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
    expected = {name: p.grad for name, p in net.named_parameters()}
    expected_x, x.grad = x.grad, None
    net.zero_grad()
    given: Any = net(x)
    if edges and outputs != "input":  # as torch 2.15 passes outputs that were sent
        given = [torch.autograd.graph.get_gradient_edge(output) for output in given]
    torch.testing.assert_close(_in_halves(net, given, gradients, x), expected_x)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_products_of_weights_are_left_to_the_second_half() -> None:
    net, x = _model(), torch.randn(2, 4, requires_grad=True)
    stage = PipelineStage(net, 1, 3, CPU)
    kwargs = {"stage_output": [net(x).sum()], "output_grads": None, "input_values": [x]}
    _, groups = stage.backward_maybe_with_nosync("input", kwargs)
    assert net[0].weight.grad is None
    stage.backward_maybe_with_nosync("weight", {"param_groups": groups})
    assert net[0].weight.grad is not None


def _hooked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.register_hook(lambda gradient: gradient * 2)
    return tensor


_HOOKED: dict[str, Any] = {
    "a value inside": lambda net, x: (net[2](net[1](_hooked(net[0](x)))),),
    "an output": lambda net, x: (_hooked(net(x)),),
    "an output of weights alone": lambda net, x: (net(x), _hooked(net[0].weight * 3)),
}


@pytest.mark.parametrize("case", _HOOKED)
def test_a_hook_on_an_activation_counts_once(case: str) -> None:
    net, x = _model(), torch.randn(2, 4, requires_grad=True)
    outputs = _HOOKED[case](net, x)
    gradients = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, gradients)
    expected, x.grad = [p.grad for p in (*net.parameters(), x)], None
    net.zero_grad()
    _in_halves(net, _HOOKED[case](net, x), gradients, x)
    for parameter, gradient in zip((*net.parameters(), x), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class _Shared(nn.Module):
    """Two weights whose gradients are one tensor, or one that is expanded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.two = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = sum(more, x)
        x = {
            "a sum of weights": lambda: x @ (self.one + self.two),
            "two of the inputs' shape": lambda: x + self.one + self.two,
            "an expanded one": lambda: (x * self.one.sum(0)) @ self.two,
            "an output that is used again": lambda: x @ self.one + self.two,
        }[self.kind]()
        return (x, self.last(x)) if self.kind.startswith("an output") else (self.last(x),)


_KINDS = [
    "a sum of weights",
    "two of the inputs' shape",
    "an expanded one",
    "an output that is used again",
]


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("kind", _KINDS)
def test_gradients_that_share_memory(kind: str, calls: bool) -> None:
    """Under a schedule with split backwards, call by call and on Taktline's own stages."""
    torch.manual_seed(0)
    layers = [_Shared(kind) for _ in range(3)]
    plain = copy.deepcopy(layers)
    stages = [PipelineStage(layer, i, 3, torch.device("cpu")) for i, layer in enumerate(layers)]
    if calls:
        wrapped(stages[0])
    schedule = ScheduleInterleavedZeroBubble(
        stages, 3, loss_fn=lambda y, t: (y[-1] - t).square().mean()
    )
    x, target = torch.randn(12, 4), torch.randn(12, 4)
    for _ in range(2):
        schedule.step(x, target=target)
        for rows, wanted in zip(x.chunk(3), target.chunk(3), strict=True):
            values: tuple[torch.Tensor, ...] = (rows,)
            for layer in plain:
                values = layer(*values)
            ((values[-1] - wanted).square().mean() / 3).backward()
    assert schedule._on_ours is not calls
    for mine, its in zip(layers, plain, strict=True):
        for name, parameter in mine.named_parameters():
            torch.testing.assert_close(parameter.grad, its.get_parameter(name).grad, msg=name)
