"""Trees of containers as plain data."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from taktline.errors import SignatureError
from taktline.transport import codec
from taktline.transport.codec import (
    decode_tree,
    encode_tree,
    note_containers,
    register_container,
)


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
        {"line\nbreak": 1, "": 2, "\ud800": 3, "größer": 4, -0.0: 5, float("inf"): 6},
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


def test_a_key_that_is_no_plain_value() -> None:
    with pytest.raises(SignatureError) as caught:
        encode_tree(pytree.tree_structure({Color.RED: 1}))
    assert str(caught.value) == (
        "dict with <Color.RED: 1> cannot be sent to another rank; use keys and fields that are "
        "numbers and strings"
    )


UNKNOWN = (
    "this rank does not know the received container '{}'; on every rank, call "
    "taktline.register_container with its class, or import the module that registers it"
)


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_registered", {})


@pytest.mark.usefixtures("nothing_registered")
def test_a_named_tuple_that_this_process_has_not_met() -> None:
    name = f"{__name__}:Pair"
    with pytest.raises(SignatureError) as caught:
        decode_tree([name, None, [None, None]])
    assert str(caught.value) == UNKNOWN.format(f"{__name__}.Pair")


@pytest.mark.usefixtures("nothing_registered")
def test_how_a_named_tuple_becomes_known() -> None:
    class Mine(NamedTuple):
        value: Any

    described = [f"{__name__}:{Mine.__qualname__}", None, [None]]
    with pytest.raises(SignatureError, match="does not know"):
        decode_tree(described)
    assert register_container(Mine) is Mine
    assert decode_tree(described).context is Mine
    note_containers(pytree.tree_structure([{"a": Pair(1, 2)}]))
    assert decode_tree([f"{__name__}:Pair", None, [None, None]]).context is Pair


def test_a_named_tuple_with_other_fields() -> None:
    register_container(Pair)
    for parts in (0, 1, 3):
        with pytest.raises(SignatureError, match="has other fields than here"):
            decode_tree([f"{__name__}:Pair", None, [None] * parts])


def test_a_dataclass_is_registered_with_pytree_too() -> None:
    @dataclass
    class Mine:
        value: Any

    register_container(Mine)
    leaves, spec = pytree.tree_flatten(Mine(3))
    assert leaves == [3]
    assert pytree.tree_unflatten([4], decode_tree(encode_tree(spec))) == Mine(4)
    register_container(Mine)  # once more changes nothing


@pytest.mark.parametrize("value", [3, int, dict, "Pair", None, Pair(1, 2), Color])
def test_what_is_no_container(value: Any) -> None:
    if value is dict:
        assert register_container(value) is dict
        return
    with pytest.raises(SignatureError, match="register_container takes a named tuple or"):
        register_container(value)


CALLED: list[Any] = []


class Trap:
    """Notes whether anybody makes one of it."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        CALLED.append((args, fields))


class Hooked(NamedTuple):
    value: Any


@pytest.mark.parametrize(
    "name",
    [
        "subprocess:Popen",
        "os:system",
        "builtins:eval",
        "torch:_inductor",
        "torch._higher_order_ops.flat_apply:_ConstantFunction",
        "torch._higher_order_ops.auto_functionalize:SchemaHolder",
        "nowhere.at_all:Thing",
        f"{__name__}:Trap",
        f"{__name__}:Hooked",
        "collections:namedtuple",
        "namedtuple",
    ],
)
@pytest.mark.parametrize(
    "describe",
    [
        lambda name: [name, None, []],
        lambda name: ["builtins:namedtuple", name, []],
        lambda name: ["builtins:namedtuple", {"$": "type", "of": name}, []],
        lambda name: ["collections:namedtuple", {"$": "type", "of": name}, [None]],
        lambda name: ["collections:defaultdict", [{"$": "type", "of": name}, []], []],
        lambda name: [f"{__name__}:Box", {"$": "type", "of": name}, []],
        lambda name: [name, ["echo", {"$": "type", "of": name}], [None, None]],
    ],
    ids=["kind", "named", "type", "old form", "factory", "context", "both"],
)
def test_nothing_that_a_message_names_is_found_or_called(
    name: str, describe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = set(sys.modules)
    monkeypatch.setattr(codec, "_registered", {})
    with pytest.raises(SignatureError):
        decode_tree(describe(name))
    assert set(sys.modules) == modules
    assert not CALLED


@pytest.mark.parametrize(
    "data",
    [
        [],
        {},
        "tuple",
        ["builtins:tuple", None],
        ["builtins:tuple", 1, []],
        ["builtins:tuple", None, None],
        ["builtins:tuple", None, [0]],
        ["builtins:dict", ["a"], []],
        ["builtins:dict", ["a", "a"], [None, None]],
        ["builtins:dict", [[]], [None]],
        ["builtins:dict", {"$": "tuple", "of": ["a"]}, [None]],
        ["builtins:dict", None, []],
        ["builtins:dict", {"a": "b"}, [None]],
        ["builtins:dict", [{"$": "dict", "of": ["a"]}], [None]],
        ["builtins:dict", [{"$": "dict", "of": [[1, 2], [1, 3]]}], [None]],
        ["builtins:dict", [{"$": "tensor", "of": "a"}], [None]],
        ["builtins:dict", [{"$": "tuple"}], [None]],
        ["builtins:dict", [{"$": [], "of": []}], [None]],
        ["collections:deque", 1, [None, None]],
        ["collections:deque", -1, []],
        ["collections:deque", 2**63, [None]],
        ["collections:defaultdict", ["list", []], []],
        ["collections:defaultdict", [1.0, []], []],
        ["builtins:dict", [{"$": "float", "of": "much"}], [None]],
        ["builtins:dict", [{"$": "str", "of": [0x110000]}], [None]],
        ["builtins:dict", [{"$": "dtype", "of": "Tensor"}], [None]],
        ["builtins:dict", [{"$": "bytes", "of": "0"}], [None]],
        [["builtins:tuple"], None, []],
        [None, None, []],
    ],
    ids=repr,
)
def test_what_is_not_described_as_a_container(data: Any) -> None:
    with pytest.raises(SignatureError):
        decode_tree(data)


def test_containers_too_deep_in_each_other() -> None:
    deep: Any = 1
    described: Any = None
    for _ in range(25):
        deep, described = [deep], ["builtins:list", None, [described]]
    with pytest.raises(SignatureError, match="nested more than 24 deep"):
        encode_tree(pytree.tree_structure(deep))
    with pytest.raises(SignatureError, match="wrong description"):
        decode_tree(described)
