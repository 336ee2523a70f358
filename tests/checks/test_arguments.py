"""What is refused of an argument, and how that is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taktline.checks import check, check_callable, check_list, check_one_of
from taktline.errors import ArgumentError


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
