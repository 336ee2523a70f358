"""What ranks tell each other before a step, and the words for what does not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline.runtime.agreement import Record, difference
from taktline.runtime.introduction import INTRODUCTION, first_difference, misfit
from taktline.runtime.introduction import digest as digest_of
from taktline.stage.names import OPTION
from taktline.transport import local, transport_of
from taktline.transport.base import Alone
from taktline.transport.exchange import share_values

OF_ONE_BATCH = (
    "pass arguments and target of one batch, with as many entries for each row, or say with "
    "target_chunk_spec=… how the target is cut by itself"
)

ONE_BATCH = (
    "inputs would meet the targets of other samples. Pass every rank of a pipeline the same batch: "
    "draw it from a generator of its own, or read it on one rank and hand it on with "
    "pipe.loader(…)"
)

LOOP = [0, 1, 2, 3, 0, 1, 2, 3]
"""Eight stages on four ranks."""

HELD = [[0, 4], [1, 5], [2, 6], [3, 7]]

ALIKE: dict[str, Any] = {
    "options": 1,
    "model": 0,
    "shards": False,
    "reduces": False,
    "in_company": False,
    "ties": [],
    "number": 1,
}


def introductions(held: Sequence[list[int]] = HELD) -> list[dict[str, Any]]:
    """The ranks that hold these stages."""
    return [ALIKE | {"stages": stages} for stages in held]


def test_an_introduction_survives_as_text() -> None:
    (mine,) = introductions([[1]])
    assert share_values(Alone(), mine, INTRODUCTION, "a test", what="it") == [mine]


@given(st.permutations(range(8)).map(list), st.integers(0, 7))
def test_only_the_stages_of_the_plan_fit(order: list[int], cut: int) -> None:
    assert misfit(introductions([[0], [], [1]]), [0, 2]) is None
    held = [sorted(order[start : start + 2]) for start in range(0, 8, 2)]
    assert (misfit(introductions(held), LOOP) is None) == (held == HELD)
    without = [[stage for stage in stages if stage != cut] for stages in HELD]
    assert misfit(introductions(without), LOOP) == (
        f"the stages are not where the schedule runs them: rank {cut % 4} has stages "
        f"[{(cut + 4) % 8}] and needs [{cut % 4}, {cut % 4 + 4}]"
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([["a", "b"]] * 3, None),
        ([["a", "b"], ["a", "b"], None], None),
        ([["a", "b"], ["a", "c"], ["a", "b"]], "option two is b on rank 0, but c on rank 1"),
        # What most have is compared with the first other one.
        ([["x", "b"], ["a", "b"], ["a", "b"]], "option one is a on rank 1, but x on rank 0"),
        ([["a", "b"], ["a"], ["a"]], "rank 1 has no option two, which is b on rank 0"),
    ],
    ids=str,
)
def test_blueprints(values: list[list[str] | None], text: str | None) -> None:
    def main(rank: int) -> str | None:
        said = [
            tuple((OPTION, *pair) for pair in zip(("one", "two"), each or (), strict=False))
            for each in values
        ]
        return first_difference(transport_of(), said[rank], [digest_of(each) for each in said])

    found = local.run(main, len(values))
    if text is None:
        assert found == [None] * len(values)
    else:
        beginning = "the ranks do not build the same pipeline: "
        advice = "; build the same model with the same options and cuts on every rank"
        assert found == [f"{beginning}{text}{advice}"] * len(values)


CALL = Record(schedule=1, call=7, step=5)


def calls(**differing: Sequence[int]) -> list[Record]:
    """Calls of as many ranks as there are values, each with its own."""
    count = len(next(iter(differing.values())))
    return [
        CALL._replace(**{field: values[rank] for field, values in differing.items()})
        for rank in range(count)
    ]


@pytest.mark.parametrize(
    "differing",
    [
        {"batch": [0]},
        {"call": [3, 3, 3, 3], "step": [2, 2, 2, 2]},
        # Some were given no arguments, some no target.
        {"arguments": [11, 0, 0, 11], "targets": [0, 0, 0, 12]},
        {"shares": [1, 1, 1, 1]},
        {"batch": [8, 0, 0, 0], "target": [0, 0, 0, 8]},
        {"batch": [8, 8, 8, 8], "target": [8, 8, 8, 8]},
        {"batch": [0, 8, 0, 8]},
        {"batch": [0, 0, 0, 0], "target": [7, 0, 0, 5]},
        # One entry a token.
        {"batch": [8, 0], "target": [0, 96]},
        {"batch": [1, 0], "target": [0, 7]},
        # Each rank's own affair.
        {"inputs": [1, 2, 3, 4]},
    ],
    ids=str,
)
def test_calls_that_are_one_step(differing: dict[str, list[int]]) -> None:
    assert difference(calls(**differing)) is None


@pytest.mark.parametrize(
    ("differing", "text"),
    [
        (
            {"schedule": [1, 2, 0], "call": [1, 4, 2]},
            "the ranks step different schedules, by the order of their first steps (0: a new one): "
            "1 on rank 0; 2 on rank 1; 0 on rank 2; step the same schedules in the same order on "
            "every rank",
        ),
        (
            {"arguments": [0, 11 << 56, 12 << 56]},
            "the ranks were given different arguments: digest 0b000000 on rank 1; "
            f"digest 0c000000 on rank 2; {ONE_BATCH}",
        ),
        (
            {"arguments": [11, 11], "targets": [12 << 56, 13 << 56]},
            "the ranks were given different targets: digest 0c000000 on rank 0; digest "
            f"0d000000 on rank 1; {ONE_BATCH}",
        ),
        (
            {"batch": [8, 0, 6, 8]},
            "the batch has different sizes: 8 on rank 0, 3; 6 on rank 2; pass every rank its part "
            "of one batch",
        ),
        (
            {"batch": [8, 0, 0, 0], "target": [0, 0, 0, 6]},
            f"the batch has 8 rows, but the target on rank 3 has 6; {OF_ONE_BATCH}",
        ),
        (
            {"batch": [7, 0], "target": [0, 1]},
            f"the batch has 7 rows, but the target on rank 1 has 1; {OF_ONE_BATCH}",
        ),
        (
            # The first target fits, the second one does not.
            {"batch": [0, 0, 3, 0], "target": [6, 7, 0, 0]},
            f"the batch has 3 rows, but the target on rank 1 has 7; {OF_ONE_BATCH}",
        ),
    ],
    ids=str,
)
def test_calls_that_are_not_one_step(differing: dict[str, list[int]], text: str) -> None:
    assert difference(calls(**differing)) == text


def test_the_first_thing_that_keeps_calls_apart_is_told() -> None:
    everything = {"call": [1, 0], "batch": [4, 8], "target": [3, 0], "arguments": [1, 2]}
    beginnings = ["the ranks are in different calls of step() and eval()"]
    beginnings += ["the batch has different sizes"]
    for beginning in beginnings:
        text = difference(calls(**everything))
        assert text is not None
        assert text.startswith(f"{beginning}: ")
        del everything[next(iter(everything))]
    assert difference(calls(**everything)) is not None
