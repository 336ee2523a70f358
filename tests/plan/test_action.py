"""The language of actions: print and parse are inverse, and errors point at the character."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline.errors import ActionSyntaxError, PlanError
from taktline.plan import Action, Kind, Overlap, parse

numbers = st.integers(0, 10**6)


def actions(*kinds: Kind) -> st.SearchStrategy[Action]:
    return st.builds(
        lambda stage, kind, number: Action(stage, kind, number if kind.has_microbatch else None),
        numbers,
        st.sampled_from(kinds or tuple(Kind)),
        numbers,
    )


overlaps = st.builds(Overlap, actions(Kind.F), actions(Kind.B, Kind.I))


@given(actions() | overlaps)
def test_what_is_printed_is_read_back(action: Action | Overlap) -> None:
    assert parse(str(action)) == action


@given(st.text(alphabet="0123456789FBIWSENDRCV_UHAOLP();- ", max_size=24))
def test_what_is_read_is_printed_back(text: str) -> None:
    try:
        printed = str(parse(text))
    except PlanError:  # a pair of actions that cannot be one
        return
    except ActionSyntaxError as error:
        printed, position = text, error.position
    else:
        position = 0
    assert printed == text
    assert 0 <= position <= len(text)


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("0BANANA3", 2, "a micro-batch number"),
        ("", 0, "a stage number"),
        (" 1F3", 0, "a stage number"),
        ("1F3x", 3, "the end"),
        ("01F3", 1, "one of F, RECOMPUTE, B, I, W"),
        ("1F03", 3, "the end"),
        ("1SEND_X3", 1, "one of F, RECOMPUTE, B, I, W"),
        ("0UNSHARD3", 8, "the end"),
        ("٣F7", 0, "a stage number"),
        ("9" * 5000 + "F0", 18, "one of F, RECOMPUTE, B, I, W"),
        ("(0F1;3X0)OVERLAP_F_B", 6, "one of F"),
        ("(0F1;3B0x)OVERLAP_F_B", 8, "the end"),
        ("(0F1,3B0)OVERLAP_F_B", 0, "a pair such as (0F1;3B0)OVERLAP_F_B"),
        ("(0F1;3B0)OVERLAP_F_B2", 0, "a pair such as"),
    ],
)
def test_a_mistake_is_pointed_at(text: str, position: int, expected: str) -> None:
    with pytest.raises(ActionSyntaxError) as caught:
        parse(text)
    assert caught.value.position == position
    assert expected in caught.value.expected
    caret = str(caught.value).splitlines()[-1]
    assert caret == "  " + " " * position + "^"


def test_the_caret_stays_in_sight_in_a_long_text() -> None:
    with pytest.raises(ActionSyntaxError) as caught:
        parse("(" * 500 + "!")
    assert max(map(len, str(caught.value).splitlines()[1:])) < 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Action(0, Kind.F), "F needs a micro-batch"),
        (lambda: Action(0, Kind.UNSHARD, 1), "UNSHARD takes no micro-batch"),
        (lambda: Action(-1, Kind.F, 0), "stage must be a whole number from 0 "),
        (lambda: Overlap(Action(0, Kind.B, 0), Action(1, Kind.F, 0)), "joins an F and a B or I"),
    ],
)
def test_actions_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()
