"""Texts and errors that every rank gets from every rank."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktline import errors
from taktline.errors import (
    ActionSyntaxError,
    InvalidPlanError,
    JsonError,
    MismatchError,
    PlanFileError,
    SignatureError,
    StageError,
    TaktlineError,
    TransportError,
)
from taktline.plan import Plan, validate
from taktline.transport import exchange, local, transport_of
from taktline.transport.exchange import share_error, share_texts

SAMPLES: dict[str, TaktlineError] = {
    name: getattr(errors, name)("größer: “nein”\n  next line")
    for name in errors.__all__
    if name
    not in ("ActionSyntaxError", "InvalidPlanError", "JsonError", "PlanFileError", "StageError")
} | {
    "ActionSyntaxError": ActionSyntaxError("1F-3", 2, "a micro-batch number"),
    "InvalidPlanError": InvalidPlanError(
        "mine", validate(Plan.from_actions([["0B0", "0F0"], ["1F0", "1B0"]]))
    ),
    "JsonError": JsonError("a message", "not JSON: nothing", row=2, column=7),
    "PlanFileError": PlanFileError("plan.csv", "an action is a text", row=2, column=7),
    "StageError": StageError(
        rank=1, stage=3, microbatch=None, action="3REDUCE_GRAD", reason="RuntimeError: no"
    ),
}


def shared_texts(texts: Sequence[str]) -> list[list[str]]:
    return local.run(lambda rank: share_texts(transport_of(), texts[rank]), len(texts))


@pytest.mark.parametrize(
    "texts",
    [
        [""],
        ["größer", "größer als 8 Bytes: 彁 🥁", "12345678", ""],
        ["\0", "\0\0", "a\0", "x" * 1000],
    ],
    ids=repr,
)
def test_every_rank_gets_every_text(texts: list[str]) -> None:
    assert shared_texts(texts) == [texts] * len(texts)


@given(st.sampled_from([1, 2, 4]).flatmap(lambda n: st.lists(st.text(), min_size=n, max_size=n)))
def test_any_texts_can_be_shared(texts: list[str]) -> None:
    assert shared_texts(texts) == [texts] * len(texts)


def shared_errors(given: Sequence[TaktlineError | None]) -> list[TaktlineError | None]:
    return local.run(lambda rank: share_error(transport_of(), given[rank]), len(given))


@pytest.mark.parametrize(("failing", "lowest"), [([0], 0), ([1, 2], 1), ([0, 1, 2, 3], 0)])
def test_every_rank_gets_the_error_of_the_lowest_rank(failing: list[int], lowest: int) -> None:
    kinds = (SignatureError, MismatchError)
    given = [kinds[rank % 2](f"of rank {rank}") if rank in failing else None for rank in range(4)]
    shared = shared_errors(given)
    assert [type(error) for error in shared] == [kinds[lowest % 2]] * 4
    assert [str(error) for error in shared] == [f"of rank {lowest}"] * 4
    # Where it was raised it is the error itself, with its traceback and its cause.
    assert shared[lowest] is given[lowest]


def test_an_error_has_its_fields_on_every_rank() -> None:
    error = StageError(rank=1, stage=3, microbatch=0, action="3F0", reason="ValueError: größer")
    cause = error.__cause__ = ValueError("größer")
    shared = shared_errors([None, error, None])
    for rank, other in enumerate(shared):
        assert type(other) is StageError
        assert str(other) == str(error)
        assert other.args == error.args
        assert vars(other) == vars(error)
        assert (other is error) == (rank == 1)
        assert other.__cause__ is (cause if rank == 1 else None)


def test_there_is_a_sample_of_every_error() -> None:
    assert SAMPLES.keys() == set(errors.__all__)
    assert {name: type(error).__name__ for name, error in SAMPLES.items()} == {
        name: name for name in SAMPLES
    }


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_can_be_shared(name: str) -> None:
    error = SAMPLES[name]
    mine, other = shared_errors([error, None])
    assert mine is error
    assert type(other) is type(error)
    assert str(other) == str(error)
    # Of what is more than numbers and texts, the text has to say all.
    lost = {"InvalidPlanError": {"violations"}}.get(name, set())
    assert vars(other) == {
        field: value for field, value in vars(error).items() if field not in lost
    }


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_pickle(name: str) -> None:
    error = SAMPLES[name]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


class Sub(MismatchError):
    """A class that other ranks do not know."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.rows = {"a": 1}
        self.count = 3
        self._private = "x"


def test_an_error_of_a_class_that_others_do_not_know() -> None:
    mine, other = shared_errors([Sub("no"), None])
    assert type(mine) is Sub
    assert type(other) is MismatchError
    assert str(other) == "no"
    assert vars(other) == {"count": 3}


class Wordless(StageError):
    def __init__(self) -> None:
        super().__init__(rank=0, stage=0, microbatch=0, action="0F0", reason="no")

    def __str__(self) -> str:
        raise RuntimeError("not even a text")


def test_an_error_without_a_readable_text() -> None:
    _, other = shared_errors([Wordless(), None])
    assert type(other) is StageError
    assert str(other) == "(its text cannot be read: RuntimeError)"


def test_a_long_text_is_shared_in_part() -> None:
    mine, other = shared_errors([MismatchError("x" * 3_000_000), None])
    assert len(str(mine)) == 3_000_000
    assert str(other) == f"{'x' * 65536} … (3,000,000 characters)"


def test_fields_that_json_cannot_hold_are_left_to_the_text() -> None:
    error = MismatchError("no\ud800")
    error.__dict__.update(nan=float("nan"), large=10**400, half="\ud800", kept=1.5)
    _, other = shared_errors([error, None])
    assert str(other) == "no?"
    assert vars(other)["kept"] == 1.5
    assert "nan" not in vars(other)
    assert "large" not in vars(other)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("nonsense", "what rank 0 has raised, row 1, column 1: not JSON"),
        ('["MismatchError", "no"]', "what rank 0 has raised: the value has 2 entries, not 3"),
        ('["restore", "no", {}]', "rank 0 has raised an error that cannot be restored: no"),
        (
            '["MismatchError", "no", {"__class__": 1}]',
            "rank 0 has raised an error that cannot be restored",
        ),
        ('["MismatchError", "no", {"a": [1]}]', "what rank 0 has raised: [2].a is a list, which"),
    ],
)
def test_an_invalid_error(text: str, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "written", lambda error: text)
    _, other = shared_errors([MismatchError("no"), None])
    assert type(other) is TransportError
    assert str(other).startswith(start)
