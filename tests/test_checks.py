"""What is refused of arguments, JSON and environment variables, and how; where warnings point."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import taktline as tl
from taktline.checks import (
    MAX_DEPTH,
    check,
    check_callable,
    check_list,
    check_one_of,
    conform,
    loads,
    number_in_environment,
    warn,
)
from taktline.errors import ArgumentError, JsonError

NAME = "TAKTLINE_STALL_SECONDS"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check("n", True, int), "n must be a whole number, not True"),
        (lambda: check("n", 5, int, least=0, most=4), "from 0 to 4, not 5"),
        (lambda: check("n", math.nan, float, least=0), "a number from 0 up, not nan"),
        (lambda: check("n", 10**999, float), "n must be a number, not 1000"),
        (lambda: check("n", "no", bool), "n must be True or False, not 'no'"),
        (lambda: check("n", b"x", str), "n must be a text, not b'x'"),
        (lambda: check("n", "\ud800", str), "n must be a text, not"),
        (lambda: check("n", "x", dict), "n must be a dict, not 'x'"),
        (lambda: check_list("n", [1, "2"], int), r"n\[1\] must be a whole number, not '2'"),
        (lambda: check_list("n", 1, dict), "n must be a list, each a dict, not 1"),
        (lambda: check_list("n", "embed"), "n must be a list, not 'embed'"),
        (lambda: check_callable("n", "mse"), "n must be a function, not 'mse'"),
        (lambda: check_one_of("n", 1, [True, "a"]), "n is one of True, a, not 1"),
        (lambda: check("n", 7, Path), "n must be the path of a file, not 7"),
        (lambda: check("n", "a\0b", Path), "n must be the path of a file, not"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), (" 0.5 ", 0.5), ("1e3", 1000.0)])
def test_seconds(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(NAME, text)
    assert number_in_environment(NAME, 60.0) == seconds


@pytest.mark.parametrize("text", ["abc", "", "nan", "inf", "-1", "0", "5s", "9" * 5000])
def test_what_is_no_number_of_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(NAME, text)
    with pytest.raises(ArgumentError, match="SECONDS must be a number of seconds, more than 0"):
        number_in_environment(NAME, 60.0)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@given(values, st.booleans())
def test_what_json_writes_is_read_back(value: Any, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    try:
        data = text.encode()
    except UnicodeEncodeError:  # a key with half of a surrogate pair
        return
    if "\\ud" not in text:
        assert loads(text, what="a text") == loads(data, what="a text") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the header, row 1, column 1: not JSON: Expecting value"),
        ("[1,\n 2,]", "the header, row 2, column 4: not JSON"),
        ("[1] 2", "not JSON: Extra data"),
        ("﻿{}", "not JSON: Unexpected UTF-8 BOM"),
        ('"\x00"', "not JSON: Invalid control character"),
        (b'"\xff"', "not JSON: 'utf-8' codec can't"),
        ('"\\ud800"', "not JSON: 'utf-8' codec can't"),
        ('{"\\udfff x": 1}', "not JSON: 'utf-8' codec can't"),
        ('"\ud800"', "not JSON: 'utf-8' codec can't"),
        ("9" * 5000, "not JSON: Exceeds the limit"),
        ("[NaN]", "not JSON: invalid literal for int"),
        ("-Infinity", "not JSON: invalid literal for int"),
        ("[" * 100_000, "not JSON: nested deeper than 64 levels"),
        ('{"a":' * 100_000, "not JSON: nested deeper than 64 levels"),
        ("[" * 65 + "]" * 65, "not JSON: nested deeper than 64 levels"),
        ('{"a":' * 65 + "1" + "}" * 65, "not JSON: nested deeper than 64 levels"),
    ],
)
def test_mistakes(text: str | bytes, message: str) -> None:
    with pytest.raises(JsonError, match=message) as caught:
        loads(text, what="the header")
    assert str(caught.value).startswith("the header")
    assert len(str(caught.value)) < 200


def test_numbers_are_finite() -> None:
    with pytest.raises(JsonError, match=r"a text: \[0\] is inf, not a finite number"):
        conform(loads("[1e999]", what="a text"), [float], what="a text")


def test_what_is_just_within_bounds() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(loads(deepest, what="a text")) == deepest
    assert loads('"\\ud83d\\ude00"', what="a text") == "😀"


def line_of_this() -> int:
    """The line that calls it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def captured_step() -> int:
    pipe = tl.Pipeline(
        [nn.Linear(2, 2)],
        ranks=1,
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        device="cpu",
        cuda_graphs=True,
    )
    x = torch.ones(2, 2)
    pipe.step(x, target=x)
    return line_of_this() - 1


def uneven_step() -> int:
    stage = tl.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    schedule, x = tl.ScheduleGPipe(stage, 2, nn.functional.mse_loss), torch.ones(3, 2)
    schedule.step(x, target=x)
    return line_of_this() - 1


def direct() -> int:
    warn("it is as it is")
    return line_of_this() - 1


@pytest.mark.parametrize("call", [captured_step, uneven_step, direct])
def test_a_warning_points_at_the_caller(call: Callable[[], int]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        line = call()
    assert [(each.filename, each.lineno) for each in told] == [(__file__, line)]
