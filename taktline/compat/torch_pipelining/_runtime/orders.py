"""The orders of the schedules as torch writes them down: plans, with a None where a rank waits.

::

    rank 0 │ 0F0 0F1 2F0 2F1  ·   ·  0F2 2B0 …
    rank 1 │  ·  1F0 1F1  ·  3F0 3B0 3F1 3B1 …

Each action takes one place, whatever it costs. Where torch leaves places empty differs from
schedule to schedule; what is in the others is Taktline's plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taktline.compat.torch_pipelining._action import B, F, _Action, _ComputationType
from taktline.plan import build

__all__ = ["Order", "order_of", "placement_of"]

Order = dict[int, list[_Action | None]]
"""By rank."""

_Done = set[tuple[int, _ComputationType, int | None]]


@dataclass(frozen=True, slots=True)
class _Size:
    """How large a pipeline is."""

    name: str
    ranks: int
    microbatches: int
    per_rank: int

    def rows(self, microbatches: int | None = None) -> list[list[_Action]]:
        """The plan of each rank."""
        count = self.microbatches if microbatches is None else microbatches
        plan = build(self.name, ranks=self.ranks, microbatches=count, stages_per_rank=self.per_rank)
        read = [[_Action.from_str(str(action)) for action in plan[r]] for r in range(self.ranks)]
        return [[action for action in row if action is not None] for row in read]

    def warmup(self, rank: int, trip: int) -> int:
        """The forwards before the first pair; ``trip`` is what each rank after this one adds."""
        rounds = max(1, self.microbatches // self.ranks)
        ahead = (self.per_rank - 1) * (self.microbatches // rounds)
        return min(ahead + trip * (self.ranks - 1 - rank), self.microbatches * self.per_rank)


def order_of(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Order:
    """The order of a schedule.

    >>> order_of("looped_bfs", 2, 1, 2)[1]
    [None, 1F0, 3F0, 3B0, 1B0]
    """
    size = _Size(name, ranks, microbatches, stages_per_rank)
    rows = _PADDED[name](size) if name in _PADDED else size.rows()
    return {rank: [*row] for rank, row in enumerate(rows)}


def placement_of(order: Mapping[int, Sequence[_Action | None]]) -> dict[int, int]:
    """The rank of each stage, by where an order computes it.

    >>> placement_of(order_of("zbv", 2, 1, 2))
    {0: 0, 3: 0, 1: 1, 2: 1}
    """
    return {
        part.stage_index: rank
        for rank, row in order.items()
        for action in row
        if action is not None
        for part in action.sub_actions or (action,)
        if part.is_compute_op
    }


def _looped_bfs(size: _Size) -> list[list[_Action | None]]:
    """Between forwards and backwards, a rank waits for those after it, there and back."""
    padded: list[list[_Action | None]] = []
    for rank, row in enumerate(size.rows()):
        half = len(row) // 2
        turn = [None] * (2 * (size.ranks - 1 - rank))
        padded.append([*[None] * rank, *row[:half], *turn, *row[half:]])
    return padded


def _interleaved(size: _Size) -> list[list[_Action | None]]:
    """One forward, one backward: where a forward is missing, its place stays empty."""
    padded: list[list[_Action | None]] = []
    for rank, row in enumerate(size.rows()):
        warmup = size.warmup(rank, 2)
        turn = size.per_rank * size.ranks + 2 * (size.ranks - 1 - rank) - (warmup + rank)
        steady: list[_Action | None] = []
        for action in row[warmup:]:
            alone = not steady or (last := steady[-1]) is None or last.computation_type is B
            if action.computation_type is B and alone:
                steady.append(None)
            steady.append(action)
        waits = [None] * (turn if warmup else 0)
        padded.append([*[None] * rank, *row[:warmup], *waits, *steady])
    return padded


def _zero_bubble(size: _Size) -> list[list[_Action | None]]:
    """Beside its turn, a rank leaves as much empty as the inputs of its forwards ask for."""
    left: list[list[_Action | None]] = []
    for rank, row in enumerate(size.rows()):
        warmup = size.warmup(rank, 1)
        turn = [None] * (size.ranks - 1 - rank if warmup else 0)
        left.append([*[None] * rank, *row[:warmup], *turn, *row[warmup:]][::-1])
    padded: list[list[_Action | None]] = [[] for _ in left]
    done: _Done = set()
    while any(left):
        fresh: _Done = set()
        for row, places in zip(left, padded, strict=True):
            if not row:
                continue
            if (action := row[-1]) is not None and not _ready(action, done):
                places.append(None)
                continue
            places.append(row.pop())
            if action is not None:
                fresh.add(action[:3])
        done |= fresh
    return padded


def _ready(action: _Action, done: _Done) -> bool:
    """Whether a forward has its input; torch leaves no place empty before a backward."""
    stage, kind, microbatch, _ = action
    return kind is not F or stage == 0 or (stage - 1, F, microbatch) in done


def _zbv(size: _Size) -> list[list[_Action | None]]:
    """The order of as many micro-batches as fill the pipeline, without those that there are not."""
    count = max(size.microbatches, 2 * size.ranks - 1)
    return [
        [*[None] * rank, *(a if (a[2] or 0) < size.microbatches else None for a in row)]
        for rank, row in enumerate(size.rows(count))
    ]


_PADDED = {
    "looped_bfs": _looped_bfs,
    "interleaved_1f1b": _interleaved,
    "interleaved_zero_bubble": _zero_bubble,
    "zbv": _zbv,
}
