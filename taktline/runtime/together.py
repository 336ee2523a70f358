"""All ranks of a plan in one thread: the order of what they do, and each one's random numbers.

Whoever is given a result goes on with it, so that no rank runs ahead of the others::

    rank 0   F0           F1                   F2
    rank 1      F0           F1          B0       F2
    rank 2         F0 B0        F1 B1                F2 B2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import cast

import numpy as np
import torch

from taktline.errors import DeadlockError
from taktline.plan import Kind, Plan
from taktline.plan.deps import needs
from taktline.plan.rows import Rows
from taktline.plan.walk import waits_between_ranks
from taktline.runtime.executor import Instruction

__all__ = ["Drawing", "RankRandom", "merged"]

_MESSAGES = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
_CALLER = -1


def merged(plan: Plan) -> Rows:
    """The rows of all ranks in one order, without messages; made once a plan.

    >>> from taktline.plan import build, lower
    >>> rows = merged(lower(build("gpipe", ranks=3, microbatches=2)))
    >>> " ".join(map(str, rows.actions()))
    '0F0 1F0 2F0 0F1 1F1 2F1 2B0 1B0 0B0 2B1 1B1 0B1'
    """
    if "merged" not in plan.known:
        rows = plan.rows[np.array(_order(plan), np.intp)]
        rows = rows[~np.isin(rows.kind, _MESSAGES)]
        plan.known["merged"] = Rows.of(rows.kind, rows.stage, rows.microbatch)
    return cast(Rows, plan.known["merged"])


def _order(plan: Plan) -> list[int]:
    """All rows, each after what it waits for."""
    waits, rank_of = waits_between_ranks(plan, needs(plan)).tolist(), plan.rank_of_rows().tolist()
    awaited = {source: rank_of[row] for row, source in enumerate(waits) if source >= 0}
    at, ends = plan.offsets[:-1].tolist(), plan.offsets[1:].tolist()
    done = [False] * len(waits)
    order: list[int] = []
    ready = list(range(plan.ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < ends[rank]:
            row = at[rank]
            if waits[row] >= 0 and not done[waits[row]]:
                break  # whoever computes that calls this rank again
            order.append(row)
            done[row] = True
            at[rank] += 1
            if row in awaited:
                ready += (rank, awaited[row])
                break
    if len(order) < len(waits):  # of a plan that was validated, nothing is left
        stuck = [(rank, row) for rank, row in enumerate(at) if row < ends[rank]]
        leaf = plan.rows.leaf
        raise DeadlockError(
            "no rank can go on"
            + "".join(f"\n  rank {r}: {leaf(row)} waits for {leaf(waits[row])}" for r, row in stuck)
        )
    return order


class Drawing:
    """Whether steps draw random numbers.

    >>> drawing = Drawing(torch.device("cpu"))
    >>> with drawing.step():
    ...     drawn = torch.rand(())
    >>> drawing.draws
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self.draws = False
        """Whether one has drawn anything so far."""

    def states(self) -> list[list[torch.Tensor]]:
        """Where each generator is."""
        return [[generator.get_state()] for generator in self._generators]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Look on at a step."""
        begun = self.states()
        try:
            yield
        finally:
            self.draws = self.draws or not _equal(begun, self.states())


class RankRandom(Drawing):
    """The random numbers of ranks that share a thread: each draws what it would alone.

    They go on where each rank was; once the caller has drawn or seeded, all begin where it is.

    >>> random = RankRandom(2, torch.device("cpu"))
    >>> with random.step():
    ...     random.switch(1)
    ...     first = torch.rand(())
    >>> torch.equal(first, torch.rand(()))
    True
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        super().__init__(device)
        self.ranks = ranks
        # Each generator, and where it is for each rank; the last one is the caller's.
        self._states = [(each, [each.get_state()] * (ranks + 1)) for each in self._generators]
        self._rank = _CALLER

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, ranks draw; the caller's generators go on as if nothing had been drawn."""
        now = [generator.get_state() for generator in self._generators]
        before = [states[_CALLER] for _, states in self._states]
        if not all(map(torch.equal, now, before)):
            for (_, states), state in zip(self._states, now, strict=True):
                states[:] = [state] * len(states)
        with super().step():
            self.switch(0)  # whoever draws without a switch
            try:
                yield
            finally:
                self.switch(_CALLER)

    def states(self) -> list[list[torch.Tensor]]:
        """Where each generator is for each rank, and last for the caller."""
        return [list(states) for _, states in self._states]

    def set_states(self, states: list[list[torch.Tensor]]) -> None:
        """Let ranks go on where they were, if there were as many."""
        if [len(each) for each in states] == [len(known) for _, known in self._states]:
            for (_, known), each in zip(self._states, states, strict=True):
                known[:] = each

    def switch(self, rank: int) -> None:
        """Let a rank draw."""
        # Not only if something was drawn: to find that out takes longer.
        for generator, states in self._states:
            states[self._rank] = generator.get_state()
            generator.set_state(states[rank])
        self._rank = rank

    def between(
        self, instructions: Iterable[Instruction], rank_of: Sequence[int]
    ) -> Iterator[Instruction]:
        """The same instructions, with a switch wherever another rank goes on."""
        before = _CALLER
        for each in instructions:
            rank = rank_of[each.action.stage]
            yield each if rank == before else replace(each, run=self._switched(rank, each.run))
            before = rank

    def _switched(self, rank: int, run: Callable[[], None]) -> Callable[[], None]:
        def switched() -> None:
            self.switch(rank)
            run()

        return switched


def _equal(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    pairs = zip(chain(*some), chain(*others), strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)
