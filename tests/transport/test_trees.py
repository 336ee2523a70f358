"""Trees of containers as plain data."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from taktline.errors import SignatureError
from taktline.transport.trees import decode_tree, encode_tree


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Hidden:
    states: Any
    mask: Any = None


pytree.register_dataclass(Hidden)


class Box:
    """A container with keys and a setting, in the manner of model outputs."""

    class Inner(NamedTuple):
        value: Any

    def __init__(self, items: dict[str, Any], dtype: torch.dtype) -> None:
        self.items = items
        self.dtype = dtype


pytree.register_pytree_node(
    Box,
    lambda box: (list(box.items.values()), (tuple(box.items), {"dtype": box.dtype})),
    lambda values, context: Box(dict(zip(context[0], values, strict=True)), context[1]["dtype"]),
)


class Color(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        (1, [2, {"three": 4}]),
        Pair(1, Pair(2, [3])),
        Box.Inner(1),
        Hidden(1, 2),
        Hidden(1),
        OrderedDict(b=1, a=2),
        defaultdict(list, {"a": [1, 2]}),
        deque([1, 2], maxlen=3),
        {(1, "two"): 1, None: 2, 3: 3, 4.5: 4, True: 5},
        torch.Size([2, 3]),
        torch.zeros(3).max(0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_tree_survives(value: Any) -> None:
    leaves, spec = pytree.tree_flatten(value)
    again = decode_tree(json.loads(json.dumps(encode_tree(spec))))
    assert again == spec
    assert repr(again) == repr(spec)
    assert repr(pytree.tree_unflatten(leaves, again)) == repr(pytree.tree_unflatten(leaves, spec))


def test_a_context_of_types_and_numbers_survives() -> None:
    leaves, spec = pytree.tree_flatten(Box({"a": 1, "b": [2]}, torch.bfloat16))
    box = pytree.tree_unflatten(leaves, decode_tree(json.loads(json.dumps(encode_tree(spec)))))
    assert (box.items, box.dtype) == ({"a": 1, "b": [2]}, torch.bfloat16)


def test_a_class_that_has_no_name_in_its_module() -> None:
    class Local(NamedTuple):
        value: int

    with pytest.raises(SignatureError) as caught:
        encode_tree(pytree.tree_structure(Local(1)))
    name = Local.__qualname__
    assert str(caught.value) == (
        f"a {name} cannot go from one rank to another, since {__name__} has no such name to find "
        "it by; define the class at the top of a module"
    )


def test_a_key_that_is_no_plain_value() -> None:
    with pytest.raises(SignatureError) as caught:
        encode_tree(pytree.tree_structure({Color.RED: 1}))
    assert str(caught.value) == (
        "a dict with <Color.RED: 1> cannot go from one rank to another; let it have keys and "
        "fields that are numbers and strings"
    )


def test_a_class_that_is_not_known_here() -> None:
    with pytest.raises(SignatureError) as caught:
        decode_tree(["nowhere.at_all:Thing", None, []])
    assert str(caught.value) == (
        "nowhere.at_all.Thing has arrived, which is not known here; import its module on every rank"
    )


def test_only_containers_are_made_from_names() -> None:
    # Whatever else a name leads to is neither called nor kept.
    with pytest.raises(SignatureError) as caught:
        decode_tree(["os:system", None, []])
    assert str(caught.value) == (
        "os.system has arrived, which is no container here; register it with pytree on every rank"
    )
    with pytest.raises(SignatureError) as caught:
        decode_tree(["collections:defaultdict", ["list", ["type", "os:system"], ["list"]], []])
    assert str(caught.value) == "os.system has arrived, which is no class here"
