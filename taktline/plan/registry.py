"""Finds a schedule by any of its usual names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TypeAlias

from taktline.checks import check, check_callable, shown
from taktline.errors import ScheduleError
from taktline.plan.plan import Placement, Plan
from taktline.plan.rows import Rows
from taktline.text import counted

MOST_RANKS, MOST_FORWARDS = 2**12, 2**24
"""Of a plan that is built: with more, it takes minutes and gigabytes."""

Generator: TypeAlias = Callable[[Placement, int], list[Rows]]
"""(placement, micro-batches) → the actions of each rank, in order."""


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule: its names, its placement, and the function that lists its actions.

    >>> find("zbv").summary
    'Zero bubble at the memory of 1F1B, with two stages per rank in a V.'
    """

    name: str
    aliases: tuple[str, ...]
    stages_per_rank: int | None
    """How many stages each rank holds; None where any number goes."""
    place: Callable[[int, int], Placement]
    generate: Generator
    summary: str

    def build(
        self,
        ranks: int,
        microbatches: int,
        stages_per_rank: int | None = None,
        *,
        most: int = MOST_FORWARDS,
    ) -> Plan:
        """The plan for these numbers, or a ScheduleError that says what would fit.

        It has at most so many forwards.
        """
        fixed, asked = self.stages_per_rank, stages_per_rank
        if fixed is not None and asked not in (None, fixed):
            fitting = [name for name in names() if find(name).stages_per_rank in (None, asked)]
            raise ScheduleError(
                f"{self.name} runs {counted(fixed, 'stage')} per rank, not {shown(asked)}; with "
                f"{shown(asked)} there are: {', '.join(fitting)}"
            )

        def count(what: str, number: int, most: int | None = None) -> int:
            name = f"{self.name}: {what}"
            return check(name, number, int, least=1, most=most, error=ScheduleError)

        ranks, microbatches = count("ranks", ranks, MOST_RANKS), count("microbatches", microbatches)
        per_rank = count("stages_per_rank", fixed or (2 if asked is None else asked))
        count("stages × microbatches", ranks * per_rank * microbatches, most)
        placement = self.place(ranks, per_rank)
        return Plan(self.generate(placement, microbatches), placement, microbatches, name=self.name)


_SCHEDULES: dict[str, NamedSchedule] = {}
"""By each of their names, as :func:`_key` writes it."""


def register(
    name: str,
    *aliases: str,
    stages_per_rank: int | None,
    place: Callable[[int, int], Placement] = Placement.loop,
) -> Callable[[Generator], Generator]:
    """Register a function (placement, micro-batches) → rows of each rank as a schedule.

    >>> from taktline.plan import Kind
    >>> @register("one_by_one", stages_per_rank=1)
    ... @each_rank
    ... def one_by_one(rank, placement, microbatches):
    ...     "A micro-batch begins when the last one has ended."
    ...     kinds = [Kind.F, Kind.B] * microbatches
    ...     return Rows.of(kinds, rank, [n // 2 for n in range(len(kinds))])
    >>> find("one_by_one").build(3, 2)[1]
    [Action(1F0), Action(1B0), Action(1F1), Action(1B1)]
    >>> unregister("one_by_one")
    """
    keys = [_key(alias) for alias in (name, *aliases)]
    if stages_per_rank is not None:
        check("stages_per_rank", stages_per_rank, int, least=1, error=ScheduleError)
    check_callable("place", place, error=ScheduleError)

    def decorate(generate: Generator) -> Generator:
        check_callable("a schedule", generate, error=ScheduleError)
        if taken := [_SCHEDULES[key].name for key in keys if key in _SCHEDULES]:
            raise ScheduleError(f"a schedule is called {taken[0]!r} already; choose another name")
        summary = (generate.__doc__ or "").strip().partition("\n")[0]
        schedule = NamedSchedule(name, aliases, stages_per_rank, place, generate, summary)
        _SCHEDULES.update(dict.fromkeys(keys, schedule))
        return generate

    return decorate


def each_rank(rank_rows: Callable[[int, Placement, int], Rows]) -> Generator:
    """A schedule from a function (rank, placement, micro-batches) → rows of this rank.

    >>> from taktline.plan import Kind
    >>> generate = each_rank(lambda rank, placement, microbatches: Rows.of(Kind.F, rank, 0))
    >>> len(generate(Placement.linear(4), 1))
    4
    """
    check_callable("rank_rows", rank_rows, error=ScheduleError)

    @wraps(rank_rows)
    def generate(placement: Placement, microbatches: int) -> list[Rows]:
        return [rank_rows(rank, placement, microbatches) for rank in range(placement.ranks)]

    return generate


def unregister(name: str) -> None:
    """Remove a schedule and all its names.

    >>> unregister("nonsense")
    Traceback (most recent call last):
    taktline.errors.ScheduleError: no schedule is called 'nonsense'; known are: ...
    """
    schedule = find(name)
    for key in [key for key, known in _SCHEDULES.items() if known is schedule]:
        del _SCHEDULES[key]


def names() -> list[str]:
    """The names of all schedules, from the plainest on.

    >>> names()[:3]
    ['forward_only', 'gpipe', '1f1b']
    """
    return list(dict.fromkeys(schedule.name for schedule in _SCHEDULES.values()))


def find(name: str) -> NamedSchedule:
    """The schedule of this name: any usual one, in any letter case.

    >>> find("ScheduleInterleaved1F1B").name
    'interleaved_1f1b'
    >>> find("1f2b")
    Traceback (most recent call last):
    taktline.errors.ScheduleError: no schedule is called '1f2b'; did you mean 1f1b? Known are: ...
    """
    key = _key(name)
    if key not in _SCHEDULES:
        close = difflib.get_close_matches(key, _SCHEDULES, n=1, cutoff=0.75)
        hint = f"did you mean {_SCHEDULES[close[0]].name}? Known are" if close else "known are"
        raise ScheduleError(f"no schedule is called {shown(name)}; {hint}: {', '.join(names())}")
    return _SCHEDULES[key]


def _key(name: str) -> str:
    """A name in plain letters, as torch's class or anyone may write it."""
    check("the name of a schedule", name, str, error=ScheduleError)
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("schedule")
