"""A stage: its parameters by name, and its backward, whole and split, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from taktline.errors import ArgumentError
from taktline.stage import PipelineStage
from taktline.stage.names import unwrapped
from taktline.stage.stage import parameters_of

CPU = torch.device("cpu")
Gradients = list[Tensor | None]


def stage_of(module: nn.Module, index: int = 1, count: int = 3) -> PipelineStage:
    return PipelineStage(module, index, count, CPU)


class Branches(nn.Module):
    """Three inputs: used, detached, unused; three outputs: one is an input, two have a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        common = F.gelu(self.common(x)) * y.detach()
        return x, self.left(common), self.right(common)


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def drawn(*reached: bool) -> Gradients:
    return [torch.randn(2, 4) if here else None for here in reached]


def inputs_of(count: int) -> list[Tensor]:
    return [torch.randn(2, 4, requires_grad=True) for _ in range(count)]


def plain(module: nn.Module, inputs: list[Tensor], gradients: Gradients) -> Gradients:
    """The gradients of the inputs and of the weights, by a plain backward."""
    module, inputs = deepcopy(module), [x.detach().clone().requires_grad_() for x in inputs]
    output = module(*inputs)
    outputs = output if isinstance(output, tuple) else (output,)
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return [x.grad for x in (*inputs, *module.parameters())]


def begun(module: nn.Module, *microbatches: list[Tensor], index: int = 1) -> PipelineStage:
    """A stage with micro-batches in flight."""
    stage = stage_of(module, index)
    stage.begin()
    for m, inputs in enumerate(microbatches):
        output = module(*inputs)
        roots = output if isinstance(output, tuple) else (output,)
        stage.keep(m, inputs if index else [], roots)
    return stage


def assert_same(actual: Gradients, expected: Gradients) -> None:
    """Equal to the last bit, and None in the same places."""
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def weights(stage: PipelineStage) -> Gradients:
    return [parameter.grad for parameter in stage.submod.parameters()]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_stage_outside_of_the_pipeline_is_refused(index: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        stage_of(nn.Linear(4, 4), index, 2)
    assert str(caught.value) == f"stage_index must be a whole number from 0 to 1, not {index}"


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


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("make", "inputs", "reached"),
    [
        (mlp, 1, [True]),
        (Branches, 3, [True, True, True]),
        (Branches, 3, [False, True, False]),
        (Branches, 3, [True, False, False]),
        (Branches, 3, [False, False, False]),
    ],
)
def test_a_backward_is_a_plain_backward(
    make: Callable[[], nn.Module], inputs: int, reached: list[bool], index: int, split: bool
) -> None:
    """The first stage, too, reaches all that its batch depends on, and returns nothing of it."""
    torch.manual_seed(0)
    module, given, gradients = make(), inputs_of(inputs), drawn(*reached)
    expected = plain(module, given, gradients)
    stage = begun(module, given, index=index)
    # W must not change what I has passed to the stage before.
    found = (stage.backward_input if split else stage.backward)(0, gradients)
    stage.backward_weight(0)
    if index:
        assert_same(found, expected[:inputs])
    else:
        assert found == []
    assert_same([x.grad for x in given] + weights(stage), expected)


@pytest.mark.parametrize("done", ["nothing", "I", "cleared", "I, cleared", "B", "I, W"])
def test_memory_is_kept_only_as_long_as_it_is_needed(done: str) -> None:
    stage, inputs, (gradient,) = begun(mlp()), inputs_of(1), drawn(True)
    outputs, mark = [stage.submod(*inputs)], nn.Identity()
    outputs[0].grad_fn.metadata["mark"] = mark
    output, kept = weakref.ref(outputs[0]), weakref.ref(mark)
    stage.keep(0, inputs, outputs)
    del inputs, outputs, mark
    assert output() is None  # only its place in the graph is
    for part in done.split(", "):
        if part == "B":
            stage.backward(0, [gradient])
        elif part == "I":
            stage.backward_input(0, [gradient])
        elif part == "W":
            stage.backward_weight(0)
        elif part == "cleared":
            stage.clear()
    gc.collect()
    assert (kept() is not None) == (done == "nothing")


def test_a_cleared_stage_has_forgotten_every_microbatch() -> None:
    given, gradients = [inputs_of(1) for _ in range(3)], drawn(True)
    stage = begun(mlp(), *given)
    stage.backward_input(0, gradients)
    before = [None if x is None else x.clone() for x in weights(stage)]
    stage.clear()
    stage.backward_weight(0)
    for m in (1, 2):
        for backward in (stage.backward, stage.backward_input):
            with pytest.raises(KeyError):
                backward(m, gradients)
    assert_same(weights(stage), before)
    # What comes next starts afresh.
    stage.submod.zero_grad()
    expected = plain(stage.submod, given[1], gradients)
    stage.keep(1, given[1], [stage.submod(*given[1])])
    assert_same([*stage.backward(1, gradients), *weights(stage)], expected)


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
