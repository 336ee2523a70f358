"""A stage: its parameters by name, and its backward, whole and split, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from taktline.errors import ArgumentError
from taktline.meta import as_arguments
from taktline.stage import PipelineStage
from taktline.stage.names import unwrapped
from taktline.stage.stage import parameters_of

CPU = torch.device("cpu")
Gradients = list[Tensor | None]


def stage_of(module: nn.Module, index: int = 1, count: int = 3) -> PipelineStage:
    return PipelineStage(module, index, count, CPU)


class SeveralOutputs(nn.Module):
    """Outputs that share a part of their graph, and each have one of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.gelu(self.common(x))
        return self.left(x), self.right(x), x


class SeveralInputs(nn.Module):
    """Two inputs are used, the second only detached, the third not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.layer(x) * y.detach()


class PassesOn(nn.Module):
    """Returns its input beside a result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.layer(x)


class TwoBranches(nn.Module):
    """Two outputs that have nothing in common but the input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


MODULES: dict[str, tuple[Callable[[], nn.Module], int, list[bool]]] = {
    "an MLP": (mlp, 1, [True]),
    "an output without gradient": (SeveralOutputs, 1, [True, False, True]),
    "no output with a gradient": (SeveralOutputs, 1, [False, False, False]),
    "inputs without gradient": (SeveralInputs, 3, [True]),
    "the input as an output": (PassesOn, 1, [True, True]),
    "only the input gets a gradient": (PassesOn, 1, [True, False]),
    "two branches": (TwoBranches, 1, [True, True]),
}
"""Each module, the number of its inputs, and which outputs get a gradient."""


class Example:
    """A module with the inputs and the output gradients of some micro-batches."""

    def __init__(self, name: str, microbatches: int = 1) -> None:
        make, inputs, reached = MODULES[name]
        self.generator = torch.Generator().manual_seed(len(name))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(len(name))
            self.module = make()
        self.inputs = [[self._random() for _ in range(inputs)] for _ in range(microbatches)]
        self.gradients: list[Gradients] = [
            [self._random() if here else None for here in reached] for _ in range(microbatches)
        ]

    def forward(self, module: nn.Module, m: int) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs as they arrive at a stage, and what the module makes of them."""
        inputs = [x.clone().requires_grad_() for x in self.inputs[m]]
        return inputs, list(as_arguments(module(*inputs)))

    def plain(self, order: Sequence[int] = (0,)) -> tuple[dict[int, Gradients], Gradients]:
        """Gradients of the inputs by micro-batch, and of the parameters, by a plain backward."""
        module, found = deepcopy(self.module), {}
        for m in order:
            inputs, outputs = self.forward(module, m)
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, self.gradients[m], strict=True)
                if gradient is not None
            ]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            found[m] = [x.grad for x in inputs]
        return found, [parameter.grad for parameter in module.parameters()]

    def begun(self) -> PipelineStage:
        """A stage in the middle, with all micro-batches in flight."""
        stage = stage_of(deepcopy(self.module))
        stage.begin()
        for m in range(len(self.inputs)):
            stage.keep(m, *self.forward(stage.submod, m))
        return stage

    def _random(self) -> Tensor:
        return torch.randn(2, 4, generator=self.generator)


def assert_same(actual: Gradients, expected: Gradients) -> None:
    """Equal to the last bit, and None in the same places."""
    assert [x is None for x in actual] == [x is None for x in expected]
    for one, other in zip(actual, expected, strict=True):
        if one is not None and other is not None:
            assert torch.equal(one, other)


def weights(stage: PipelineStage) -> Gradients:
    return [parameter.grad for parameter in stage.submod.parameters()]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_stage_outside_of_the_pipeline_is_refused(index: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        stage_of(nn.Linear(4, 4), index, 2)
    assert str(caught.value) == f"stage_index must be a whole number from 0 to 1, not {index}"


@pytest.mark.parametrize(
    ("index", "count", "first", "last"),
    [(0, 1, True, True), (0, 3, True, False), (1, 3, False, False), (2, 3, False, True)],
)
def test_a_stage_knows_whether_it_is_first_or_last(
    index: int, count: int, first: bool, last: bool
) -> None:
    stage = stage_of(nn.Linear(4, 4), index, count)
    assert (stage.is_first, stage.is_last) == (first, last)


def test_a_stage_says_what_it_is() -> None:
    assert repr(stage_of(nn.Linear(4, 4), 0, 2)) == (
        "PipelineStage(0 of 2, Linear, 20 parameters, cpu)"
    )
    meta = PipelineStage(nn.ReLU(), 1, 2, torch.device("meta"))
    assert repr(meta) == "PipelineStage(1 of 2, ReLU, 0 parameters, meta)"


def test_examples_are_kept_as_signatures() -> None:
    x = torch.zeros(2, 4)
    stage = PipelineStage(nn.ReLU(), 0, 2, CPU, input_args=x, output_args=(x, x.long()))
    assert str(stage.expected_input) == "(float32[2, 4])"
    assert str(stage.expected_output) == "(float32[2, 4], int64[2, 4])"
    assert stage_of(nn.ReLU()).expected_input is None
    assert stage_of(nn.ReLU()).expected_output is None


def test_begin_returns_which_parameters_are_trained() -> None:
    module = nn.Linear(4, 4)
    stage = stage_of(module)
    assert stage.begin() == (True, True, True)
    module.weight.requires_grad_(False)
    assert stage.begin() == (True, False, True)
    assert stage_of(nn.ReLU().eval()).begin() == (False,)


def run_backward(stage: PipelineStage, gradients: Gradients, *, split: bool) -> Gradients:
    """The gradients of the inputs of micro-batch 0."""
    if not split:
        return stage.backward(0, gradients)
    given = stage.backward_input(0, gradients)
    stage.backward_weight(0)
    return given


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", MODULES)
def test_a_backward_is_a_plain_backward(name: str, split: bool) -> None:
    example = Example(name)
    inputs, parameters = example.plain()
    stage = example.begun()
    # W must not change what I has passed to the stage before.
    assert_same(run_backward(stage, example.gradients[0], split=split), inputs[0])
    assert_same(weights(stage), parameters)


@pytest.mark.parametrize("split", [False, True])
def test_the_first_stage_reaches_all_that_the_batch_depends_on(split: bool) -> None:
    example = Example("an MLP")
    inputs, parameters = example.plain()
    stage = stage_of(deepcopy(example.module), 0)
    stage.begin()
    # Made by a part of the model that is in no stage, or given with requires_grad.
    x = example.inputs[0][0].clone().requires_grad_()
    stage.keep(0, [], [stage.submod(x)])
    assert run_backward(stage, example.gradients[0], split=split) == []
    assert_same([x.grad], inputs[0])
    assert_same(weights(stage), parameters)


@pytest.mark.parametrize("done", ["nothing", "I", "cleared", "I, cleared", "B", "I, W"])
def test_memory_is_kept_only_as_long_as_it_is_needed(done: str) -> None:
    example = Example("an MLP")
    stage = stage_of(deepcopy(example.module))
    stage.begin()
    inputs, outputs = example.forward(stage.submod, 0)
    kept = weakref.ref(outputs[0])
    stage.keep(0, inputs, outputs)
    del inputs, outputs
    for part in done.split(", "):
        if part == "B":
            stage.backward(0, example.gradients[0])
        elif part == "I":
            stage.backward_input(0, example.gradients[0])
        elif part == "W":
            stage.backward_weight(0)
        elif part == "cleared":
            stage.clear()
    gc.collect()
    assert (kept() is not None) == (done == "nothing")


def test_a_cleared_stage_has_forgotten_every_microbatch() -> None:
    example = Example("an MLP", 3)
    stage = example.begun()
    stage.backward_input(0, example.gradients[0])
    before = [None if x is None else x.clone() for x in weights(stage)]
    stage.clear()
    stage.backward_weight(0)
    for m in (1, 2):
        with pytest.raises(KeyError):
            stage.backward(m, example.gradients[m])
        with pytest.raises(KeyError):
            stage.backward_input(m, example.gradients[m])
    assert_same(weights(stage), before)
    # What comes next starts afresh.
    stage.submod.zero_grad()
    inputs, parameters = example.plain([1])
    stage.keep(1, *example.forward(stage.submod, 1))
    assert_same(stage.backward(1, example.gradients[1]), inputs[1])
    assert_same(weights(stage), parameters)


def shared() -> nn.Module:
    """A weight in two layers, a layer in two places, and a place without a bias."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Sequential(second), first, nn.LayerNorm(2))
    model.register_module("missing", None)
    return model


@pytest.mark.parametrize(
    "make",
    [
        shared,
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.BatchNorm1d(2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.PReLU())),
        nn.Identity,
    ],
    ids=["shared", "transformer", "checkpointed", "parametrized", "scripted", "none"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_parameters_are_those_of_the_module_in_its_order(make: Callable[[], nn.Module]) -> None:
    module = make()
    found = parameters_of(module)
    expected = list(module.parameters())
    assert len(found) == len(expected)
    assert all(
        one is other or torch.equal(one, other) for one, other in zip(found, expected, strict=True)
    )
    assert all(p.requires_grad for p in found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_are_taken_off() -> None:
    inside = nn.Sequential()  # without layers it counts as false
    compiled = torch.compile(checkpoint_wrapper(inside))
    assert unwrapped(compiled) is inside  # pyright: ignore[reportArgumentType]
    assert unwrapped(inside) is inside
