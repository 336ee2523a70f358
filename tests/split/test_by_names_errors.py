"""What is said when a model cannot be cut by names as asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError
from tests.split.transformers_models import LANGUAGES, texts

X = torch.ones(2, 4)


class Model(nn.Module):
    """The norm is defined before the layers that are called before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.bias = nn.Parameter(torch.zeros(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.spare = nn.Sequential(nn.Linear(4, 4))
        self.order = [0, 1, 2, 3]
        self.ends = False

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.order:
            x = self.layers[layer](x)
        return x if self.ends else self.norm(x) + self.bias


class Loop(Model):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.layers[1](self.layers[0](self.embed(x)))
        return x


class Again(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.layers[0](self.embed(x)))


class Changes(Model):
    """Changes what an earlier stage has."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.embed(x))
        with torch.no_grad():
            self.embed.bias.add_(1)
        return x


class Asks(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.layers[0](x) if x.sum() > 0 else x


def wrapped() -> nn.Module:
    model = Model()
    model.forward = torch.no_grad()(model.forward)
    return model


ONE = ["layers.0"]


@pytest.mark.parametrize(
    ("model", "cuts", "text"),
    [
        (Model(), ["layer.1"], r"'layer.1', but Model has no such submodule; did you mean 'layers"),
        (Model(), ["qqq"], r"no such submodule; there are 'embed', 'norm', 'layers', 'layers.0'"),
        (Model(), "layers.1", r"cuts must be a list of names of submodules, not 'layers.1'"),
        (Model(), ["layers.1", "layers.1"], r"cuts name 'layers.1' twice"),
        (Model(), ["spare", "spare.0"], r"the cut 'spare.0' is inside 'spare'"),
        (Model(), ["layers"], r"'layers' is a ModuleList, which is never called .* 'layers.0'"),
        (
            Model(),
            ["layers.2", "layers.1"],
            r"calls 'layers.1' before 'layers.2'; list the cuts in the order of their calls",
        ),
        (Model(), ["layers.1", "spare"], r"Model does not call 'spare', so no stage can begin"),
        (Loop(), ["layers.1@2"], r"Loop does not call 'layers.1@2', so no stage can begin there"),
        (Loop(), ["layers.1", "layers.0@1", "layers.1"], r"cuts name 'layers.1' twice"),
        (Loop(), ["layers.1@1", "layers.0"], r"calls 'layers.0' before 'layers.1@1'; list"),
        (Again(), ONE, r"changes 'embed\.1\.\w+', which stages \[0, 1\] use; cut the model so"),
        (Changes(), ONE, r"errors.py:\d+ changes 'embed.bias', which stages \[0, 1\] use; cut the"),
        (Asks(), ONE, r"test_by_names_errors.py:\d+: __bool__ needs the data of a value that sub"),
        (wrapped(), ONE, r"forward of Model was replaced on this object.* before its forw"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut(model: nn.Module, cuts: Sequence[str], text: str) -> None:
    with pytest.raises(PartitionError, match=text):
        tl.split.by_names(model, cuts, example=(X,))


def test_an_example_of_rows_of_different_lengths() -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(PartitionError, match=r"NestedTensor cannot go from stage to stage; pass"):
        tl.split.by_names(Model(), ONE, example=(rows,))
    with pytest.raises(PartitionError, match=r"NestedTensor cannot go from stage to stage; pass"):
        tl.Pipeline(Model(), example=(rows,), ranks=2, microbatches=2)


def test_an_invalid_example() -> None:
    with pytest.raises(PartitionError, match="example must be a tuple of arguments, a dict"):
        tl.split.by_names(Model(), ONE, example=[X])
    with pytest.raises(PartitionError, match="example has the keyword 3, which is not a name"):
        tl.split.by_names(Model(), ONE, example={3: X})


def test_a_forward_that_fails_is_reported() -> None:
    with pytest.raises(TypeError) as caught:
        tl.split.by_names(Model(), ONE, example=(X, X))
    assert "ran the forward of Model without data" in caught.value.__notes__[0]


def test_without_an_example_the_order_is_that_of_definition() -> None:
    with pytest.raises(PartitionError, match=r"'layers.1' is defined before 'layers.2'"):
        tl.split.by_names(Model(), ["layers.2", "layers.1"])
    pieces = tl.split.by_names(Model(), ["layers.2"])
    with pytest.raises(
        PartitionError, match=r"calls 'norm' in stage 1, but it is in stage 0; pass example="
    ):
        pieces(X)
    model = Model()
    model.norm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    pieces = tl.split.by_names(model, ["layers.2"])
    with pytest.raises(
        PartitionError, match=r"uses the parameter 'bias' in stage 1, but it is in stage 0; pass"
    ):
        pieces(X)


def test_pieces_on_their_own() -> None:
    pieces = tl.split.by_names(Model(), ["layers.2"], example=(X,))
    with pytest.raises(PartitionError, match=r"stage 1 takes what stage 0 returns, not the arg"):
        pieces[1](X)
    assert pieces[1].get_submodule("layers.2")(X).shape == X.shape


def test_no_stage_has_the_cache_of_all_layers() -> None:
    pieces = tl.split.by_names(LANGUAGES["llama"].make(), LANGUAGES["llama"].cuts(2))
    with pytest.raises(PartitionError, match="use_cache needs the keys and values of the layers"):
        pieces(texts(1)[0], use_cache=True)


def test_what_all_layers_return() -> None:
    model = LANGUAGES["llama"].make()
    pieces = tl.split.by_names(model, LANGUAGES["llama"].cuts(2))
    options = {"output_hidden_states": True, "output_attentions": True}
    found, right = (each(texts(1)[0], **options) for each in (pieces, model))
    for key in ("hidden_states", "attentions"):
        assert all(map(torch.equal, found[key], right[key]))


def test_hooks_of_the_model_itself() -> None:
    model = Model()
    model.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(PartitionError, match=r"Model has a hook, but is cut: it runs once, while"):
        tl.split.by_names(model, ONE, example=(X,))
