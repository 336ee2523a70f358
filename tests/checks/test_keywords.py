"""Unknown keywords of public functions and classes: the error names the one that was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import taktline as tl
from taktline.checks import known_keywords
from taktline.errors import ArgumentError

PLAN = tl.build("1f1b", ranks=2, microbatches=4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda **k: tl.Pipeline([nn.Linear(1, 1)], **k),
            "Pipeline() takes no 'micro_batches'; did you mean 'microbatches'?",
        ),
        (
            lambda **k: tl.build("1f1b", ranks=2, **k),
            "build() takes no 'micro_batches'; did you mean 'microbatches'?",
        ),
    ],
)
def test_micro_batches(call: Callable[..., Any], text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(micro_batches=4)
    assert str(caught.value) == text
    assert caught.value.__cause__ is None


CALLS: list[tuple[Callable[..., Any], str, str]] = [
    (lambda **k: tl.split.auto(nn.Linear(1, 1), 2, (), **k), "measured", "measure"),
    (lambda **k: tl.split.by_names(nn.Linear(1, 1), [], **k), "exmaple", "example"),
    (lambda **k: tl.split.materialise(nn.Linear(1, 1), "cpu", **k), "state", "state_dict"),
    (lambda **k: tl.simulate(PLAN, **k), "cost", "costs"),
    (lambda **k: tl.validate(PLAN, **k), "send", "sends"),
    (lambda **k: tl.lower(PLAN, **k), "merged", "merge"),
    (lambda **k: tl.balance([1.0], 1, **k), "limit", "limits"),
    (lambda **k: tl.Costs(**k), "foward", "forward"),
    (lambda **k: tl.Link(**k), "latencies", "latency"),
    (lambda **k: tl.compile_stages(nn.Linear(1, 1), **k), "dynamics", "dynamic"),
    (lambda **k: tl.local.run(lambda rank: rank, 2, **k), "strictly", "strict"),
    (
        lambda **k: tl.Pipeline([nn.Linear(1, 1)], microbatches=1).save("x", **k),
        "async_",
        "async_save",
    ),
]


@pytest.mark.parametrize(("call", "unknown", "known"), CALLS)
def test_every_room(call: Callable[..., Any], unknown: str, known: str) -> None:
    with pytest.raises(ArgumentError, match=rf"takes no '{unknown}'; did you mean .*'{known}'"):
        call(**{unknown: 1})


def test_errors_from_inside_stay_as_they_are() -> None:
    @known_keywords
    def outer(number: int, **rest: Any) -> None:
        inner(**rest)

    def inner() -> None:
        pass

    with pytest.raises(TypeError, match=r"inner\(\) got an unexpected keyword argument 'x'"):
        outer(1, x=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'number'"):
        outer(x=2)  # pyright: ignore[reportCallIssue]


def test_a_missing_argument_is_no_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'ranks'"):
        tl.build("1f1b", microbatches=4)  # pyright: ignore[reportCallIssue]
