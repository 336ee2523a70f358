"""What ranks tell each other before a step, and the words for what does not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from taktline.meta import Signature
from taktline.runtime.agreement import WHICH_STEP, Record, difference, other_kind
from taktline.runtime.introduction import INTRODUCTION, examples, introduced, misfit
from taktline.transport.exchange import share_values
from taktline.transport.one_rank import Alone

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


def introductions(
    held: Sequence[list[int]] = HELD, rank_of: list[int] = LOOP, **differing: Sequence[Any]
) -> list[SimpleNamespace]:
    """The ranks that hold these stages, each with its own value of some fields."""
    alike = ALIKE | {"num_stages": len(rank_of), "rank_of": rank_of}
    return [
        introduced(
            alike | {"stages": stages} | {field: of[rank] for field, of in differing.items()}
        )
        for rank, stages in enumerate(held)
    ]


ALIKE: dict[str, Any] = {
    "schedule": "1F1B",
    "microbatches": 8,
    "plan": "0123456789abcdef",
    "trains": True,
    "dynamic_shapes": False,
    "run_ahead": False,
    "shards": False,
    "reduces": False,
    "in_company": False,
    "takes": [],
    "gives": [],
    "ties": [],
    "model": 0,
    "number": 1,
}


def test_an_introduction_survives_as_text() -> None:
    mine = ALIKE | {"schedule": "plan 'größer'", "num_stages": 2, "stages": [1], "rank_of": [0, 1]}
    assert share_values(Alone(), mine, INTRODUCTION, "a test", what="it") == [mine]


@pytest.mark.parametrize(
    ("held", "rank_of"),
    [
        (HELD, LOOP),
        ([[4, 0], [1, 5], [6, 2], [7, 3]], LOOP),
        ([[0]], [0]),
        ([[2, 0, 1]], [0, 0, 0]),
        ([[0, 3], [1, 2]], [0, 1, 1, 0]),
        ([[0], [], [1]], [0, 2]),
    ],
    ids=str,
)
def test_ranks_that_fit_together(held: list[list[int]], rank_of: list[int]) -> None:
    assert misfit(introductions(held, rank_of)) is None


def test_examples_that_do_not_fit_together() -> None:
    def example(*shape: int, dtype: torch.dtype = torch.float32) -> Signature:
        return Signature.of([torch.zeros(shape, dtype=dtype)])

    gives = [examples({0: example(4, 8)}), [], examples({2: example(4, 8)}), []]
    fits = [[], examples({1: example(9, 8)}), [], examples({3: example(4, 8)})]
    assert misfit(introductions(gives=gives, takes=fits)) is None
    half = examples({3: example(4, 8, dtype=torch.float16)})
    assert misfit(introductions(gives=gives, takes=[*fits[:3], half])) == (
        "stage 2 on rank 2 has (float32[4, 8]) (output_args), but stage 3 on rank 3 takes "
        "(float16[4, 8]) (input_args): output 0 is float32[4, 8], not float16[4, 8]"
    )


@pytest.mark.parametrize(
    ("field", "values", "text"),
    [
        (
            "schedule",
            ["GPipe", "1F1B", "GPipe", "1F1B"],
            "the ranks disagree on the schedule: GPipe on rank 0, 2; 1F1B on rank 1, 3",
        ),
        (
            "schedule",
            ["A", "B", "C", "A"],
            "the ranks disagree on the schedule: A on rank 0, 3; B on rank 1; C on rank 2",
        ),
        (
            "microbatches",
            [8, 8, 8, 4],
            "the ranks disagree on the number of micro-batches: 8 on rank 0, 1, 2; 4 on rank 3",
        ),
        (
            "num_stages",
            [8, 4, 4, 4],
            "the ranks disagree on the number of stages: 8 on rank 0; 4 on rank 1, 2, 3",
        ),
        (
            "trains",
            [False, True, False, False],
            "the ranks disagree on the presence of a loss_fn: False on rank 0, 2, 3; True on "
            "rank 1",
        ),
    ],
)
def test_ranks_that_disagree(field: str, values: list[Any], text: str) -> None:
    assert misfit(introductions(**{field: values})) == f"{text}; pass the same on every rank"


def test_ranks_with_different_plans() -> None:
    plans = ["a" * 64, "b" * 64, "a" * 64, "b" * 64]
    assert misfit(introductions(plan=plans)) == (
        "the ranks have different plans: aaaaaaaa on rank 0, 2; bbbbbbbb on rank 1, 3; build or "
        "read the same plan on each"
    )


@pytest.mark.parametrize(
    ("held", "rank_of", "text"),
    [
        (
            [[0, 4], [1, 1], [2, 6, 7], []],
            LOOP,
            "stage 1 exists 2 times: on rank 1, 1; stage 3 is missing: no rank has it; stage 5 is "
            "missing: no rank has it. Rank 1 has 2 stages (1, 1) and needs 2 stages (1, 5); rank 2 "
            "has 3 stages (2, 6, 7) and needs 2 stages (2, 6); rank 3 has no stage and needs 2 "
            "stages (3, 7)",
        ),
        (
            [[0, 4]] * 4,
            LOOP,
            "stage 0 exists 4 times: on rank 0, 1, 2, 3; stage 1 is missing: no rank has it; stage "
            "2 is missing: no rank has it; stage 3 is missing: no rank has it; stage 4 exists 4 "
            "times: on rank 0, 1, 2, 3; stage 5 is missing: no rank has it; stage 6 is missing: no "
            "rank has it; stage 7 is missing: no rank has it. Rank 1 has 2 stages (0, 4) and needs "
            "2 stages (1, 5); rank 2 has 2 stages (0, 4) and needs 2 stages (2, 6); rank 3 has 2 "
            "stages (0, 4) and needs 2 stages (3, 7)",
        ),
        (
            [[0, 4, 5], [1, 5], [2, 6], [3, 7, 0]],
            LOOP,
            "stage 0 exists 2 times: on rank 0, 3; stage 5 exists 2 times: on rank 0, 1. Rank 0 "
            "has 3 stages (0, 4, 5) and needs 2 stages (0, 4); rank 3 has 3 stages (3, 7, 0) and "
            "needs 2 stages (3, 7)",
        ),
        (
            [[0, 7], [1, 6], [2, 5], [3, 4]],
            LOOP,
            "the stages are not where the schedule runs them. Rank 0 has 2 stages (0, 7) and needs "
            "2 stages (0, 4); rank 1 has 2 stages (1, 6) and needs 2 stages (1, 5); rank 2 has 2 "
            "stages (2, 5) and needs 2 stages (2, 6); rank 3 has 2 stages (3, 4) and needs 2 "
            "stages (3, 7)",
        ),
        (
            [[0], [2], [1]],
            [0, 0, 1],
            "the stages are not where the schedule runs them. Rank 0 has 1 stage (0) and needs 2 "
            "stages (0, 1); rank 2 has 1 stage (1) and needs no stage",
        ),
        (
            [[], [], [], []],
            [0, 1, 2, 3],
            "stage 0 is missing: no rank has it; stage 1 is missing: no rank has it; "
            "stage 2 is missing: no rank has it; stage 3 is missing: no rank has it. "
            "Rank 0 has no stage and needs 1 stage (0); rank 1 has no stage and needs 1 stage (1); "
            "rank 2 has no stage and needs 1 stage (2); rank 3 has no stage and needs 1 stage (3)",
        ),
        (
            # One that the plan does not know.
            [[0], [1, 5]],
            [0, 1],
            "the stages are not where the schedule runs them. Rank 1 has 2 stages (1, 5) and needs "
            "1 stage (1)",
        ),
    ],
)
def test_stages_that_are_missing_or_there_too_often(
    held: list[list[int]], rank_of: list[int], text: str
) -> None:
    assert misfit(introductions(held, rank_of)) == text


def test_the_first_thing_that_does_not_fit_is_told() -> None:
    """What explains the rest comes first."""
    everything = {
        "schedule": ["A", "B"],
        "microbatches": [1, 2],
        "num_stages": [2, 3],
        "trains": [True, False],
        "plan": ["a" * 64, "b" * 64],
    }
    nouns = ["schedule", "number of micro-batches", "number of stages", "presence of a loss_fn"]
    for noun in nouns:
        text = misfit(introductions([[1], [0]], [0, 1], **everything))
        assert text is not None
        assert text.startswith(f"the ranks disagree on the {noun}: ")
        del everything[next(iter(everything))]
    text = misfit(introductions([[1], [0]], [0, 1], **everything))
    assert text is not None
    assert text.startswith("the stages are not where the schedule runs them. ")
    text = misfit(introductions([[0], [1]], [0, 1], **everything))
    assert text is not None
    assert text.startswith("the ranks have different plans: ")


@given(st.permutations(range(8)).map(list), st.integers(0, 7))
def test_only_the_stages_of_the_plan_fit(order: list[int], cut: int) -> None:
    held = [sorted(order[start : start + 2]) for start in range(0, 8, 2)]
    assert (misfit(introductions(held)) is None) == (held == HELD)
    without = [[stage for stage in stages if stage != cut] for stages in HELD]
    assert misfit(introductions(without)) == (
        f"stage {cut} is missing: no rank has it. Rank {cut % 4} has 1 stage ({(cut + 4) % 8}) and "
        f"needs 2 stages ({cut % 4}, {cut % 4 + 4})"
    )


CALL = Record(
    failed=0,
    schedule=1,
    waiting=0,
    place=0,
    call=7,
    step=5,
    plan=0x1234567890ABCDE,
    batch=0,
    target=0,
    shares=0,
    traces=0,
    inputs=0,
)


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
        {"compared": [7, 7, 7, 7], "arguments": [11, 0, 0, 11], "targets": [0, 0, 0, 12]},
        # What a GPU has found of an earlier call is compared with its like.
        {"compared": [6, 0], "arguments": [11, 12]},
        {"compared": [6, 7], "arguments": [11, 12]},
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
        # A rank may have made some that it has not used.
        {"schedule": [0, 0], "waiting": [2, 1], "place": [1, 0]},
        {"schedule": [0, 0], "waiting": [2, 2], "place": [1, 1]},
    ],
    ids=str,
)
def test_calls_that_are_one_step(differing: dict[str, list[int]]) -> None:
    assert mismatch(calls(**differing)) is None


@pytest.mark.parametrize(
    ("differing", "text"),
    [
        (
            {"schedule": [1, 2, 0], "call": [1, 4, 2]},
            "the ranks step different schedules, counted by their first steps: number 1 on rank "
            "0; number 2 on rank 1; a new one on rank 2; step the same schedules in the same "
            "order on every rank",
        ),
        (
            {"schedule": [0, 0], "waiting": [2, 2], "place": [0, 1]},
            "the ranks begin with different schedules of those made and not stepped yet: number 1 "
            "on rank 0; number 2 on rank 1; make and step the schedules in the same order on "
            "every rank",
        ),
        (
            {"call": [4, 3]},
            "the ranks are in different calls of step() and eval(): number 4 on rank 0; number 3 "
            "on rank 1; a rank has left one out, or made one more. Make the same calls on every "
            "rank",
        ),
        (
            {"step": [100, 0, 0]},
            "the ranks disagree on the number of training steps so far: 100 on rank 0; 0 on rank "
            "1, 2; set steps on every rank when you resume",
        ),
        (
            {"compared": [7, 7, 7], "arguments": [0, 11 << 56, 12 << 56]},
            "the ranks were given different arguments in call 7: digest 0b000000 on rank 1; "
            f"digest 0c000000 on rank 2; {ONE_BATCH}",
        ),
        (
            {"compared": [6, 6, 5], "arguments": [11, 11, 11], "targets": [12 << 56, 13 << 56, 1]},
            "the ranks were given different targets in call 6: digest 0c000000 on rank 0; digest "
            f"0d000000 on rank 1; {ONE_BATCH}",
        ),
        (
            {"shares": [1, 0]},
            "the ranks disagree on the value of share_losses: True on rank 0; False on rank 1; "
            "pass the same on every rank",
        ),
        (
            {"plan": [0xABCDEF012345678, 0x1, 0x1, 0xABCDEF012345678]},
            "the ranks run different plans: abcdef01 on rank 0, 3; 00000000 on rank 1, 2; step "
            "the same schedule on every rank",
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
            {"batch": [8, 0], "target": [0, 12]},
            f"the batch has 8 rows, but the target on rank 1 has 12; {OF_ONE_BATCH}",
        ),
        (
            # Half as many: a loss would broadcast them.
            {"batch": [8, 0], "target": [0, 4]},
            f"the batch has 8 rows, but the target on rank 1 has 4; {OF_ONE_BATCH}",
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
    assert mismatch(calls(**differing)) == text


def mismatch(calls: Sequence[Record]) -> str | None:
    return difference(WHICH_STEP, calls) or other_kind(calls)


def test_the_first_thing_that_keeps_calls_apart_is_told() -> None:
    everything = {"call": [1, 0], "plan": [1, 2], "batch": [4, 8], "target": [3, 0]}
    beginnings = ["the ranks are in different calls of step() and eval()"]
    beginnings += ["the ranks run different plans", "the batch has different sizes"]
    for beginning in beginnings:
        text = mismatch(calls(**everything))
        assert text is not None
        assert text.startswith(f"{beginning}: ")
        del everything[next(iter(everything))]
    assert mismatch(calls(batch=[4, 4], **everything)) is not None
