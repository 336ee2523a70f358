"""The exact way, where OR-tools is installed: CP-SAT, with the best order so far as a hint.

Micro-batches pass each stage in turn, so memory becomes precedence: if a rank holds at most k
activations of its one stage, F of micro-batch b comes after W of b − k. Where the stages of a rank
share memory, or I releases a part of it, this is a reservoir instead, which is slower.
"""

from __future__ import annotations

import math
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from taktline.errors import ScheduleError
from taktline.plan.work import MARGIN, Order, Work, run

_TICKS = 20_000
"""Times are whole numbers in the solver: so many for the step of the hint."""
_MOST = 2_500
"""The most actions of a plan that it is asked for: with more it finds nothing in minutes."""


def installed() -> bool:
    """Whether OR-tools is there."""
    return find_spec("ortools") is not None


def require() -> None:
    """Raise unless OR-tools is there."""
    if not installed():
        raise ScheduleError("the solver is not installed: pip install 'taktline[solve]'")


def solvable(work: Work) -> bool:
    """Whether the solver is of use: not too much work, and ranks that begin one after the other."""
    first = work.placement.rank_of[: work.placement.ranks]
    few = len(work.time) * work.microbatches <= _MOST
    return few and len(set(first)) == work.placement.ranks


def solve(
    work: Work, hint: Order, by_span: bool, *, seconds: float, seed: int
) -> tuple[Order, float]:
    """The best order that is found, and what no order is below, in the unit of the costs.

    It works for so many seconds of its own count, so that it finds the same each time, and no
    longer than twice as many of the clock.
    """
    model = _Model(work, hint, by_span)
    cp: Any = import_module("ortools.sat.python.cp_model")
    solver = cp.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.max_time_in_seconds = 2 * seconds
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 1
    status = solver.solve(model.model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return hint, 0.0
    return model.order(solver), solver.best_objective_bound / model.scale


class _Model:
    """A start for each letter of each micro-batch, and what must hold between them."""

    def __init__(self, work: Work, hint: Order, by_span: bool) -> None:
        cp: Any = import_module("ortools.sat.python.cp_model")
        ran = run(work, hint)
        assert ran is not None, "the hint runs"
        # All is rounded down: then no order takes longer here than it does, and the least time here
        # is a bound.
        self.work, self.scale = work, _scale(work, ran.makespan)
        self.time = [math.floor(each * self.scale) for each in work.time]
        hop = [math.floor(each * self.scale) for each in work.hop]
        horizon = math.ceil(ran.makespan * self.scale) + 1
        self.model: Any = cp.CpModel()
        self.starts = [
            [self.model.new_int_var(0, horizon - length, "") for _ in range(work.microbatches)]
            for length in self.time
        ]
        for letter, source in enumerate(work.source):
            for number, begin in enumerate(self.starts[letter]):
                if source >= 0:
                    self.model.add(begin >= self._end(source, number) + hop[source])
                if letter % 3:
                    self.model.add(begin >= self._end(letter - 1, number))
                if number:
                    self.model.add(begin >= self._end(letter, number - 1))
        for rank in range(work.placement.ranks):
            self._one_by_one(rank)
            self._in_memory(rank)
        cost: Any = self.model.new_int_var(0, horizon, "")
        for letter, rank in enumerate(work.rank):
            begin = math.ceil(ran.first[rank] * self.scale) if by_span else 0
            self.model.add(cost >= self._end(letter, work.microbatches - 1) - begin)
        self.model.minimize(cost)
        count = [0] * len(work.time)
        for word, begins in zip(hint, ran.starts, strict=True):
            for letter, begin in zip(word, begins, strict=True):
                at = math.floor(begin * self.scale)
                self.model.add_hint(self.starts[letter][count[letter]], at)
                count[letter] += 1

    def order(self, solver: Any) -> Order:
        """The order of the solver's starts; in a draw, that of a micro-batch's life."""
        words: list[list[tuple[int, int, int, int]]] = [
            [] for _ in range(self.work.placement.ranks)
        ]
        for letter, rank in enumerate(self.work.rank):
            for number, begin in enumerate(self.starts[letter]):
                stage, kind = divmod(letter, 3)
                life = (kind, stage if kind == 0 else -stage)
                words[rank].append((int(solver.value(begin)), number, *life))
        kinds = [[(kind, abs(stage)) for _, _, kind, stage in sorted(word)] for word in words]
        return [[3 * stage + kind for kind, stage in word] for word in kinds]

    def _end(self, letter: int, number: int) -> Any:
        return self.starts[letter][number] + self.time[letter]

    def _letters(self, rank: int) -> list[int]:
        return [letter for letter, of in enumerate(self.work.rank) if of == rank]

    def _one_by_one(self, rank: int) -> None:
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(begin, self.time[letter], "")
            for letter in self._letters(rank)
            for begin in self.starts[letter]
        )

    def _in_memory(self, rank: int) -> None:
        """No more than the rank's memory at any time."""
        work, letters, limit = self.work, self._letters(rank), self.work.memory[rank]
        whole = sum(work.takes[letter] for letter in letters)
        if not letters or math.isinf(limit) or limit >= work.microbatches * whole:
            return
        if len(letters) == 3 and not work.frees[letters[1]]:
            fits = int(limit * (1 + MARGIN) / whole)
            for number in range(fits, work.microbatches):
                released = self._end(letters[2], number - fits)
                self.model.add(self.starts[letters[0]][number] >= released)
            return
        times: list[Any] = []
        changes: list[int] = []
        # Rounded so that what fits still fits.
        unit = limit / _TICKS
        for letter in letters:
            for number, begin in enumerate(self.starts[letter]):
                if work.takes[letter]:
                    times.append(begin)
                    changes.append(math.floor(work.takes[letter] / unit))
                if work.frees[letter]:
                    times.append(self._end(letter, number))
                    changes.append(-math.ceil(work.frees[letter] / unit))
        least = -2 * len(letters) * work.microbatches
        self.model.add_reservoir_constraint(times, changes, least, _TICKS)


def _scale(work: Work, makespan: float) -> float:
    """How many ticks are one unit of time: few, where these are exact."""
    exact = math.lcm(*(Fraction(each).denominator for each in (*work.time, *work.hop)))
    return exact if exact <= 16 else _TICKS / makespan
