"""Values of Python as JSON: each comes back as it was, or is refused."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from taktline.checks import loads
from taktline.transport.codec import NotPlainError, pack, unpack

VALUES: list[Any] = [
    [None, True, 7, -(2**70), 0.1, -0.0, "größer\n", b"\0x"],
    "half of a pair: \ud800",
    (1, [2, (3,)], deque([4])),
    {"a": 1, "$": 2, 3: {"b": (4,)}},
    [OrderedDict(b=1, a=2), Counter("aab"), float("-inf")],
    [torch.bfloat16, int, list],
]


@pytest.mark.parametrize("tensors", [None, {}], ids=["in a message", "in a file"])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_survives(value: Any, tensors: Any) -> None:
    text = json.dumps(pack(value, "value", tensors))
    again = unpack(loads(text, what="a value"))
    assert again == value
    assert repr(again) == repr(value)


def test_what_only_a_file_can_have() -> None:
    class Color(IntEnum):
        RED = 1

    values: list[Any] = [
        torch.ones(2),
        torch.tensor(3),
        np.arange(3),
        {1, 2},
        Color.RED,
        np.int64(4),
    ]
    for value in values:
        with pytest.raises(NotPlainError):
            pack([value], "x")
    tensors: dict[str, torch.Tensor] = {}
    again = unpack(loads(json.dumps(pack(values, "x", tensors)), what="x"), tensors.__getitem__)
    assert sorted(tensors) == ["x[0]", "x[2]"]
    assert str(again) == str([*values[:4], 1, 4])


def test_nan_survives() -> None:
    assert math.isnan(unpack(pack(math.nan, "x")))


@pytest.mark.parametrize("kind", ["tensor", "array", "number", "eval", "namedtuple", None, []])
def test_a_message_has_no_other_kinds(kind: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        unpack({"$": kind, "of": ["int64", 1]})
