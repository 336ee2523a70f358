"""Beside torch's own pipeline(): the same stages, parameters and outputs, where it works."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as peer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import taktline as tl
from tests.split.models import BEGINNING, CASES, END, make
from tests.split.test_pipe import names

# torch's tracing copies trees in a way that torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    "name", ["gpt", pytest.param("llama", marks=pytest.mark.matrix), "resnet", "unet"]
)
def test_the_same_stages(name: str, stages: int) -> None:
    case = CASES[name]
    x, _ = case.batch(3)
    spec = case.cuts[stages]
    ours = tl.pipeline(make(name), (x,), split_spec=spec)
    theirs_spec = {key: peer.SplitPoint[point.name] for key, point in spec.items()}
    theirs = peer.pipeline(make(name), (x,), split_spec=theirs_spec)
    assert ours.num_stages == theirs.num_stages
    assert names(ours) == names(theirs)
    torch.manual_seed(0)
    expected = theirs(x)
    torch.manual_seed(0)
    assert all(
        torch.equal(*pair)
        for pair in zip(pytree.tree_leaves(ours(x)), pytree.tree_leaves(expected), strict=True)
    )


class Chain(nn.Module):
    """Layers of which each takes what some earlier ones gave."""

    def __init__(self, sources: list[list[int]]) -> None:
        super().__init__()
        self.sources = sources
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in sources)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, sources in zip(self.layers, self.sources, strict=True):
            values.append(torch.tanh(layer(sum(values[source] for source in sources))))
        return values[-1] + values[0]


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[int]], dict[str, Any]]:
    length = draw(st.integers(1, 6))
    sources = [
        draw(st.lists(st.integers(0, place), min_size=1, max_size=3)) for place in range(length)
    ]
    layers = st.sampled_from([f"layers.{place}" for place in range(length)])
    return sources, draw(st.dictionaries(layers, st.sampled_from([BEGINNING, END])))


@pytest.mark.slow
@settings(max_examples=8)
@given(chains())
def test_any_split_points_of_any_chain(chain: tuple[list[list[int]], dict[str, Any]]) -> None:
    sources, spec = chain
    model, x = Chain(sources), torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = tl.pipeline(model, (x,), split_spec=spec)
    assert pipe.num_stages <= len(spec) + 1
    output = pipe(x)
    assert torch.equal(output, model(x))
    found = gradients(output, model)
    for name, gradient in gradients(model(x), model).items():
        torch.testing.assert_close(found[name], gradient)


def gradients(output: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(output.sum(), list(named.values()), allow_unused=True)
    return dict(zip(named, found, strict=True))
