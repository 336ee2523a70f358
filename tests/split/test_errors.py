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
        ({}, r"no split point: pass split_spec, .* or call pipe_split\(\) in the forward"),
        ({"split_policy": lambda gm: gm}, r"let split_policy put pipe_split\(\) between the steps"),
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


def test_a_branch_on_what_layers_compute() -> None:
    with pytest.raises(PartitionError, match=r"test_errors.py:\d+: __bool__ needs the data of a"):
        tl.pipeline(Branches(), (X,), split_spec={"layers.1": BEGINNING})


class Either(Model):
    def forward(self, x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Tensor:
            x = x + 1
            tl.pipe_split()
            return x * 2

        return torch.cond(x.sum() > 0, yes, lambda x: x - 1, (x,))


def test_a_split_point_inside_of_a_region() -> None:
    with pytest.raises(PartitionError, match=r"inside a region .*cond.*; move the split point"):
        tl.pipeline(Either(), (X,))
