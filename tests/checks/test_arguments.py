"""What is refused of an argument, and how that is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from taktline import checks
from taktline.errors import ArgumentError


@pytest.mark.parametrize(
    ("require", "message"),
    [
        (lambda: checks.require_whole("n", True), "n must be a whole number, not True"),
        (lambda: checks.require_whole("n", 5, least=0, most=4), "from 0 to 4, not 5"),
        (
            lambda: checks.require_number("n", math.nan, least=0),
            "a number from 0 up, not",
        ),
        (lambda: checks.require_number("n", 10**999), "n must be a number, not 1000"),
        (lambda: checks.require_flag("n", "no"), "n must be True or False, not 'no'"),
        (lambda: checks.require_text("n", b"x"), "n must be a text, not b'x'"),
        (lambda: checks.require_text("n", "\ud800"), "n must be a text, not"),
        (lambda: checks.require_instance("n", "x", dict), "n must be a dict, not 'x'"),
        (lambda: checks.require_instances("n", [1, "2"], int), r"n\[1\] must be an int, not '2'"),
        (lambda: checks.require_iterable("n", "embed"), "n must be a list, not 'embed'"),
        (lambda: checks.require_callable("n", "mse"), "n must be a function, not 'mse'"),
        (lambda: checks.require_one_of("n", 1, [True, "a"]), "n is one of True, a, not 1"),
        (lambda: checks.require_path("n", 7), "n must be the path of a file, not 7"),
    ],
)
def test_what_is_refused(require: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        require()
