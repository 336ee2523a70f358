"""A small part of the torture, the same each time; ``make torture`` runs as much as you like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

import taktline as tl
from tests.torture.case import draw
from tests.torture.run import Record, run_local
from tests.torture.verdict import complaint, judge
from tests.workers import Workers, WorkersLost

RANKS = 4
CASES = [*(f"local-{n}" for n in range(40)), *(f"gloo-{n}" for n in range(15))]


@pytest.mark.processes
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_nothing_hangs_and_nothing_is_wrong(workers: Workers, name: str) -> None:
    case = draw(name, RANKS)
    verdict = judge(workers, case, timeout=60.0)
    assert not verdict.wrong, f"{case}\n{verdict}"


def first(wanted: Callable[[Any], bool]) -> Any:
    """The first case of a kind."""
    return next(case for n in range(1000) if wanted(case := draw(f"local-{n}", RANKS)))


def test_wrong_values_are_noticed() -> None:
    case = first(lambda case: case.exact and not any(call.faults for call in case.calls))
    ranks = run_local(0, None, case)
    assert not complaint(case, ranks).wrong
    step = max(n for n, call in enumerate(case.calls) if call.what == "step")
    name = next(iter(ranks[0][step].gradients))
    gradient = ranks[0][step].gradients[name]
    gradient.view(-1)[0] += 1e-3
    assert complaint(case, ranks).kind == "wrong gradients"
    del ranks[0][step].gradients[name]
    assert complaint(case, ranks).kind == "wrong gradients"
    ranks[0][step] = replace(ranks[0][step], error=ValueError("why"))
    assert complaint(case, ranks).kind == "wrong errors"


@pytest.mark.parametrize(
    "change", [{"rank": 77}, {"stage": 77}, {"microbatch": 77}, {"reason": "no"}, {"action": "0W0"}]
)
def test_wrong_errors_are_noticed(change: Mapping[str, Any]) -> None:
    case = first(lambda case: any(call.faults for call in case.calls))
    ranks = run_local(0, None, case)
    assert not complaint(case, ranks).wrong
    at = next(n for n, call in enumerate(case.calls) if call.faults)
    error = ranks[0][at].error
    assert isinstance(error, tl.StageError)
    names = ("rank", "stage", "microbatch", "action", "reason")
    fields = {name: getattr(error, name) for name in names}
    for rank in ranks:
        rank[at] = Record(error=tl.StageError(**{**fields, **change}))
    assert complaint(case, ranks).kind == "wrong errors"


def test_hangs_are_noticed() -> None:
    class Silent(Workers):
        def run(self, *args: Any, **options: Any) -> list[Any]:
            raise WorkersLost("no answer within 1 s from rank 0", {}, [0])

    assert judge(Silent(), draw("gloo-0"), timeout=1.0).kind == "hangs"


@pytest.mark.parametrize("name", ["nccl-1", "local", "gloo-x", ""])
def test_names_of_no_case(name: str) -> None:
    with pytest.raises(ValueError, match="a case is called local-17 or gloo-17, not"):
        draw(name)


def test_a_case_follows_from_its_name() -> None:
    assert str(draw("gloo-5")) == str(draw("gloo-5"))
    assert draw("gloo-5").plan == draw("gloo-5").plan
