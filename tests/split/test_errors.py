"""What is said when a model cannot be cut as asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import PartitionError
from tests.split.models import BEGINNING

X = torch.ones(2, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"no split point: pass split_spec or split_policy, or call pipe_split\(\)"),
        (
            {"split_spec": {"layer.1": BEGINNING}},
            r"split_spec names 'layer.1', but Model has no such submodule; did you mean 'layers.1'",
        ),
        (
            {"split_spec": {"qqq": BEGINNING}},
            r"names 'qqq', but Model has no such submodule; there are 'layers', 'layers.0'",
        ),
        (
            {"split_spec": {"spare": BEGINNING}},
            r"the forward does not call 'spare', so there is nothing to split at; name submodules",
        ),
        ({"split_spec": {"layers.1": "end"}}, r"must be SplitPoint.BEGINNING or SplitPoint.END"),
        ({"split_spec": {}, "split_policy": lambda gm: gm}, r"pass only one of them"),
        ({"split_policy": lambda gm: None}, r"split_policy must return the GraphModule"),
    ],
)
def test_split_points_that_are_none(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PartitionError, match=text):
        tl.pipeline(Model(), (X,), **options)


def test_arguments_that_are_no_tuple() -> None:
    args: Any = X
    with pytest.raises(PartitionError, match="mb_args must be a tuple of arguments, not Tensor"):
        tl.pipeline(Model(), args, split_spec={"layers.1": BEGINNING})


def test_a_stage_that_is_not_there() -> None:
    pipe = tl.pipeline(Model(), (X,), split_spec={"layers.1": BEGINNING})
    with pytest.raises(PartitionError, match=r"there is no stage 2: .* from 0 to 1"):
        pipe.get_stage_module(2)


class Branches(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else x


def test_a_model_that_cannot_be_exported() -> None:
    with pytest.raises(PartitionError) as caught:
        tl.pipeline(Branches(), (X,), split_spec={"layers.0": BEGINNING})
    text = str(caught.value)
    assert text.startswith("Could not guard on data-dependent expression")
    assert "torch.export cannot export Branches (see above)" in text
    assert caught.value.__cause__ is not None


class WithoutGradient(Model):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Mixed(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Either(Model):
    def forward(self, x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            x = x + 1
            tl.pipe_split()
            return x * 2

        return torch.cond(x.sum() > 0, yes, lambda x: x - 1, (x,))


@pytest.mark.parametrize(
    ("model", "region"),
    [(WithoutGradient, "no_grad"), (Mixed, "autocast"), (Either, "cond")],
)
def test_a_split_point_inside_of_a_region(model: type[Model], region: str) -> None:
    spec = None if model is Either else {"layers.1": BEGINNING}
    with pytest.raises(PartitionError, match=rf"inside a region .*{region}.*; move the split"):
        tl.pipeline(model(), (X,), split_spec=spec)
