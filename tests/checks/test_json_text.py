"""JSON from outside: read as it is meant, or refused with one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline.checks import MAX_DEPTH, conform, loads
from taktline.errors import JsonError

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
        (b'"\xff"', "is not a text in UTF-8"),
        ('"\\ud800"', "is not a text in UTF-8"),
        ('{"\\udfff x": 1}', "is not a text in UTF-8"),
        ('"\ud800"', "is not a text in UTF-8"),
        ("9" * 5000, "holds a number that is not finite, or has too many digits"),
        ("[NaN]", "holds a number that is not finite"),
        ("-Infinity", "holds a number that is not finite"),
        ("[" * 100_000, "is nested deeper than 64 levels"),
        ('{"a":' * 100_000, "is nested deeper than 64 levels"),
        ("[" * 65 + "]" * 65, "is nested deeper than 64 levels"),
        ('{"a":' * 65 + "1" + "}" * 65, "is nested deeper than 64 levels"),
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
