"""Descriptions of what crosses a boundary: what they tell, and what they tell apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from taktline.meta import Signature, TensorMeta, as_arguments, flatten

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8)

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
constants = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Zeros of any shape and type, with or without a gradient."""
    tensor = torch.zeros(draw(shapes), dtype=draw(st.sampled_from(DTYPES)))
    return tensor.requires_grad_(tensor.is_floating_point() and draw(st.booleans()))


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(children, max_size=3)
    return several | several.map(tuple) | st.dictionaries(st.text(max_size=3), children, max_size=3)


values = st.recursive(constants | tensors(), _containers, max_leaves=8)
arguments = st.lists(values, max_size=4).map(tuple)


class Pair(NamedTuple):
    """A container with a type of its own."""

    left: Any
    right: Any


@pytest.mark.parametrize(
    ("tensor", "meta", "text", "nbytes"),
    [
        (torch.zeros(4, 16), TensorMeta((4, 16), torch.float32), "float32[4, 16]", 256),
        (torch.tensor(7), TensorMeta((), torch.int64), "int64[]", 8),
        (torch.zeros(2, 0, 3).bool(), TensorMeta((2, 0, 3), torch.bool), "bool[2, 0, 3]", 0),
        (
            nn.Parameter(torch.zeros(2, dtype=torch.float64)),
            TensorMeta((2,), torch.float64, requires_grad=True),
            "float64[2]",
            16,
        ),
    ],
)
def test_a_tensor_is_described(
    tensor: torch.Tensor, meta: TensorMeta, text: str, nbytes: int
) -> None:
    assert TensorMeta.of(tensor) == meta
    assert str(meta) == text
    assert meta.nbytes == nbytes


def test_a_signature_has_leaves_tensors_and_gradients() -> None:
    signature = Signature.of(
        [torch.zeros(2, requires_grad=True), 7, torch.zeros(3).bool(), None, "x"]
    )
    assert signature.leaves == (
        TensorMeta((2,), torch.float32, requires_grad=True),
        7,
        TensorMeta((3,), torch.bool),
        None,
        "x",
    )
    assert signature.tensors == (
        TensorMeta((2,), torch.float32, requires_grad=True),
        TensorMeta((3,), torch.bool),
    )
    # The gradient requires no gradient itself.
    assert signature.gradients == (TensorMeta((2,), torch.float32),)
    assert signature.spec is None
    assert str(signature) == "(float32[2], 7, bool[3], None, x)"


def _difference(expected: Sequence[Any], actual: Sequence[Any], **options: Any) -> str:
    return Signature.of(*flatten(expected)).difference(*flatten(actual), **options)


X = torch.zeros(2, 3)
WITH = torch.zeros(2, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("expected", "actual", "text"),
    [
        ([X], [X, X], "there are 2 outputs, not 1"),
        ([X, X], [X], "there is 1 output, not 2"),
        ([X], [], "there are 0 outputs, not 1"),
        ([X], [torch.zeros(2, 4)], "output 0 is float32[2, 4], not float32[2, 3]"),
        ([X], [torch.zeros(())], "output 0 is float32[], not float32[2, 3]"),
        ([X], [TensorMeta((2,), X.dtype)], "output 0 is float32[2], not float32[2, 3]"),
        ([X], [X.bfloat16()], "output 0 is bfloat16[2, 3], not float32[2, 3]"),
        (
            [X],
            [WITH],
            "output 0 is float32[2, 3] with gradient, not float32[2, 3] without gradient",
        ),
        (
            [WITH],
            [X],
            "output 0 is float32[2, 3] without gradient, not float32[2, 3] with gradient",
        ),
        ([X, 1], [X, True], "output 1 is True, not 1"),
        ([X, 1.0], [X, 1], "output 1 is 1, not 1.0"),
        ([X, None], [X, 0], "output 1 is 0, not None"),
        ([X, 1], [X, "1"], "output 1 is '1', not 1"),
        ([X, "one"], [X, "two"], "output 1 is 'two', not 'one'"),
        ([1.5], [math.nan], "output 0 is nan, not 1.5"),
        ([X], [None], "output 0 is None, not float32[2, 3]"),
        (["x"], [X], "output 0 is float32[2, 3], not 'x'"),
        (
            [X, 1, WITH],
            [X.long(), 2, torch.zeros(1, requires_grad=True)],
            "output 0 is int64[2, 3], not float32[2, 3]; output 1 is 2, not 1; "
            "output 2 is float32[1], not float32[2, 3]",
        ),
    ],
)
def test_differences_are_described(expected: list[Any], actual: list[Any], text: str) -> None:
    assert _difference(expected, actual) == text


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (([X, 1],), ((X, 1),)),
        (([X, 1],), (X, 1)),
        ((X, 1), ([X, 1],)),
        (({"a": X, "b": 1},), ({"a": X, "c": 1},)),
        (([X], [1]), ([], [X, 1])),
        ((Pair(X, 1),), ((X, 1),)),
    ],
)
def test_another_tree_is_reported(expected: tuple[Any, ...], actual: tuple[Any, ...]) -> None:
    text = _difference(expected, actual)
    assert text.startswith("the outputs are arranged as ")
    assert str(flatten(expected)[1]) in text
    assert str(flatten(actual)[1]) in text


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        (torch.zeros(5, 3), ""),
        (WITH, ""),  # gradients may differ
        (torch.zeros(5, 2), "float32[5, 2]"),
        (torch.zeros(5, 3).double(), "float64[5, 3]"),
        (torch.zeros(3), "float32[3]"),
        (torch.zeros(2, 3, 1), "float32[2, 3, 1]"),
        (torch.zeros(()), "float32[]"),  # a single number has no batch
    ],
)
def test_the_batch_may_have_another_size_than_an_example(actual: torch.Tensor, text: str) -> None:
    found = _difference([X], [actual], is_example=True)
    assert found == (text and f"output 0 is {text}, not float32[2, 3]")
    assert (_difference([X], [actual]) == "") == (actual is X)


def test_nan_equals_itself() -> None:
    # It differs from every number, even from itself; but as a constant it is still the same.
    assert _difference([X, math.nan], [X, float("nan")]) == ""
    assert _difference([X, math.nan], [X, 0.0]) != ""


@pytest.mark.parametrize(
    ("value", "several"),
    [
        *((value, False) for value in (X, None, 3, "text", Pair(X, 1), {"a": X}, {})),
        *((value, True) for value in ((), (X,), [X], (X, 1), [X, None], ([X],), [{"a": X}])),
    ],
)
def test_a_list_or_a_tuple_is_several_arguments(value: Any, several: bool) -> None:
    found = as_arguments(value)
    assert (found if several else found[0]) is value
    assert several or len(found) == 1


@pytest.mark.parametrize(
    ("nested", "leaves"),
    [
        (({"a": X, "b": 2},), [X, 2]),
        # As many leaves as arguments, but not the arguments themselves.
        (([X, WITH], []), [X, WITH]),
        ((Pair(X, None), 1), [X, None, 1]),
        (((),), []),
    ],
)
def test_containers_are_opened(nested: tuple[Any, ...], leaves: list[Any]) -> None:
    found, spec = flatten(nested)
    assert [*map(id, found)] == [*map(id, leaves)]
    assert spec is not None
    assert str(pytree.tree_unflatten(found, spec)) == str(nested)


@given(arguments, arguments)
def test_opened_arguments_can_be_put_together_again(
    given: tuple[Any, ...], others: tuple[Any, ...]
) -> None:
    leaves, spec = flatten(given)
    containers = (list, tuple, dict)
    assert not any(isinstance(leaf, containers) for leaf in leaves)
    assert (spec is None) == (not any(isinstance(argument, containers) for argument in given))
    again = leaves if spec is None else pytree.tree_unflatten(leaves, spec)
    assert str(tuple(again)) == str(given)
    for is_example in (False, True):
        assert _difference(given, given, is_example=is_example) == ""
    assert (_difference(given, others) == "") == (_difference(others, given) == "")
