"""The backward of a stage over torch's groups of weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from taktline.compat.torch_pipelining.schedules import ScheduleInterleavedZeroBubble
from taktline.compat.torch_pipelining.stage import PipelineStage
from taktline.errors import SplitError
from tests.compat.peer import SINCE_2_12, Failure, module, outcome, require_same
from tests.compat.programs import wrapped

_backward = module("._backward")


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


@given(_words, _outputs, st.booleans())
def test_both_halves_are_the_whole(words: list[str], outputs: str, wanted: bool) -> None:
    net = _Net(words, outputs)
    x = torch.randn(3, 4, requires_grad=wanted)
    gradients = [torch.randn_like(output) for output in net(x)]
    pairs = [p for p in zip(net(x), gradients, strict=True) if p[0].requires_grad]
    if not pairs:
        return
    torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
    expected = {name: p.grad for name, p in net.named_parameters()}
    expected_x, x.grad = x.grad, None
    net.zero_grad()

    backward = _backward.ours
    (found,), groups = backward.stage_backward_input(net(x), gradients, [x], net.parameters())
    assert all(p.grad is None for p in net.parameters())
    together = [node for group in groups for node in group["params"]]
    assert len(together) == len(set(together))
    told = backward.stage_backward_weight(net.parameters(), groups)

    torch.testing.assert_close(found, expected_x)
    for grad, (name, parameter) in zip(told, net.named_parameters(), strict=True):
        assert grad is parameter.grad
        torch.testing.assert_close(grad, expected[name])


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
    backward, outputs = _backward.ours, _HOOKED[case](net, x)
    _, groups = backward.stage_backward_input(outputs, gradients, [x], net.parameters())
    backward.stage_backward_weight(net.parameters(), groups)
    for parameter, gradient in zip((*net.parameters(), x), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_groups_are_those_of_torch() -> None:
    model = _model()
    x = torch.randn(2, 4, requires_grad=True)
    told: list[Any] = []
    for package in _backward:
        y = model(x)
        reverse = package.construct_reverse_graph([y.grad_fn])
        node = package._get_grad_fn_or_grad_acc
        params = [node(p) for p in model.parameters()]
        names = dict(zip(params, "abcd", strict=True)) | {node(x): "x"}

        def name(node: Any, names: dict[Any, str] = names) -> str:
            return names.get(node) or str(node.name())

        listed = sorted((name(n), sorted(map(name, above))) for n, above in reverse.items())
        closure, reached = package.reverse_closure([node(x)], {y.grad_fn}, reverse)
        groups = package.get_param_groups([node(x)], params, reverse)
        told.append(
            (
                listed,
                sorted(map(name, closure)),
                list(map(name, reached)),
                [{key: sorted(map(name, group[key])) for key in sorted(group)} for group in groups],
                node(torch.zeros(1)),
            )
        )
    assert told[0] == told[1]


def test_several_steps_add_up() -> None:
    model, x = _model(), torch.randn(2, 4, requires_grad=True)
    reference = copy.deepcopy(model)
    for _ in range(3):
        reference(x).sum().backward()
        loss = model(x).sum()
        _, groups = _backward.ours.stage_backward_input([loss], None, [x], model.parameters())
        assert sorted(groups[0])[:3] == ["grads", "intermediates", "params"]
        assert not loss.requires_grad  # the graph hangs on the groups alone
        _backward.ours.stage_backward_weight(model.parameters(), groups)
        assert list(groups[0]) == ["params"]
    for ours, plain in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)


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
@pytest.mark.usefixtures("fake_group")
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


@pytest.mark.parametrize(
    "given",
    [
        *("one", "none", "one and none", "nothing"),
        pytest.param("two", marks=SINCE_2_12),  # before, torch took what is too much
    ],
)
def test_gradients_that_somebody_else_put_in(given: str) -> None:
    one = torch.ones(2, 4)
    grads = {
        "one": (one,),
        "none": (None,),
        "one and none": (one, None),
        "two": (one, one),
        "nothing": (),
    }
    found: list[Any] = []
    for package in _backward:
        model, x = _model(), torch.ones(2, 4, requires_grad=True)
        _, groups = package.stage_backward_input([model(x).sum()], None, [x], model.parameters())
        for group in groups:
            group["grads"] = [grads[given]]
        outcome_ = outcome(package.stage_backward_weight, model.parameters(), groups)
        failed = isinstance(outcome_, Failure)
        found.append(outcome_ if failed else [p.grad for p in model.parameters()])
    require_same(*found)


def test_weights_need_what_the_inputs_gave_once() -> None:
    model, x = _model(), torch.randn(2, 4, requires_grad=True)
    backward = _backward.ours
    _, groups = backward.stage_backward_input([model(x).sum()], None, [x], model.parameters())
    backward.stage_backward_weight(model.parameters(), groups)
    with pytest.raises(SplitError, match="what stage_backward_input has returned, each once"):
        backward.stage_backward_weight(model.parameters(), groups)


def test_a_first_half_that_fails_shows_what_it_was_given() -> None:
    layer, x = torch.nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
    given = ([layer(x)], [torch.ones(4, 2)], [x], layer.parameters())
    with pytest.raises(RuntimeError, match="Failed to run stage backward input:") as caught:
        module("._backward").ours.stage_backward_input(*given)
    assert "Output gradient: ['Tensor(torch.Size([4, 2])" in str(caught.value)
    assert "shape" in str(caught.value.__cause__)


def test_outputs_given_by_their_edges() -> None:
    """An output that was sent can be freed: its edge is enough."""
    model, x = _model(), torch.randn(2, 4, requires_grad=True)
    model(x).backward(torch.ones(2, 4))
    expected, x.grad = [p.grad for p in (x, *model.parameters())], None
    model.zero_grad()
    edge, one = torch.autograd.graph.get_gradient_edge(model(x)), torch.ones(2, 4)
    backward = _backward.ours
    (found,), groups = backward.stage_backward_input([edge], [one], [x], model.parameters())
    backward.stage_backward_weight(model.parameters(), groups)
    for ours, plain in zip((found, *(p.grad for p in model.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, plain)
    edge = torch.autograd.graph.get_gradient_edge(model(x))
    with pytest.raises(SplitError, match="its gradient is needed; pass it in output_grads"):
        backward.stage_backward_input([edge], None, [x], model.parameters())


_GIVEN: dict[str, Any] = {
    "a loss": lambda y, one: (y.sum(), None),
    "an output": lambda y, one: (y, one),
    "a tuple": lambda y, one: ((y, y * 2), (one, one)),
    "a loss among others": lambda y, one: ((y, y.sum()), (one, None)),
    "what has no gradient": lambda y, one: ((y, one, 3), (one, None, None)),
    "a dict": lambda y, one: ({"a": y, "b": 3}, {"a": one, "b": None}),
    "a list and a tuple": lambda y, one: ([y], (one,)),
    "some": lambda y, one: ((y, y * 2), (one, one), [1]),
    "no gradient": lambda y, one: (y, None),
    "too many": lambda y, one: ((y,), (one, one)),
    "other keys": lambda y, one: ({"a": y}, {"b": one}),
    "another shape": lambda y, one: (y, torch.ones(3)),
    "no such output": lambda y, one: ((y,), (one,), [5]),
}


@pytest.mark.parametrize("case", _GIVEN)
def test_a_whole_backward(case: str) -> None:
    found: list[Any] = []
    for package in _backward:
        model = _model()
        x, aside = torch.ones(2, 4, requires_grad=True), torch.ones(2)
        output, gradient, *which = _GIVEN[case](model(x), torch.ones(2, 4))
        inputs = [x, aside, "label", None]
        result = outcome(package.stage_backward, output, gradient, inputs, *which)
        found.append(result if isinstance(result, Failure) else (result, x.grad))
        if not isinstance(result, Failure):
            found[-1] += ([p.grad for p in model.parameters()],)
    require_same(*found)


@SINCE_2_12
def test_small_parts() -> None:
    x, unused = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    for package in _backward:
        package_sum = package._null_coalesce_accumulate
        assert (package_sum(None, 1), package_sum(1, None), package_sum(2, 3)) == (1, 1, 5)
        grads = package._autograd_grad_for_inputs
        assert grads([x.sum()], [torch.ones(1), "label"]) == (None, None)
        given, none = grads([(x * 2).sum()], [x, unused], allow_unused=True)
        assert (given.tolist(), none) == ([2, 2], None)
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            grads([x.sum()], [x, unused])
