"""Which rank holds which stage.

::

    linear, 4 ranks     loop, 4 ranks × 2     v, 4 ranks × 2
    rank 0: 0           rank 0: 0 4           rank 0: 0 7
    rank 1: 1           rank 1: 1 5           rank 1: 1 6
    rank 2: 2           rank 2: 2 6           rank 2: 2 5
    rank 3: 3           rank 3: 3 7           rank 3: 3 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from taktline.checks import require_iterable, require_whole, shown
from taktline.errors import NoSuchRankError, PlanError
from taktline.text import counted

MOST_RANKS, MOST_STAGES = 2**16, 2**20
"""A larger number is a typing error, and tables of that size would take too long."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Stage → rank, and back.

    >>> Placement.v(4).stages_of(1)
    (1, 6)
    """

    rank_of: tuple[int, ...]
    ranks: int
    _held: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """The stages of each rank."""

    def __post_init__(self) -> None:
        ranks = _count("ranks", self.ranks, MOST_RANKS)
        rank_of = tuple(require_iterable("rank_of", self.rank_of, error=PlanError))
        _count("the number of stages", len(rank_of), MOST_STAGES)
        held: list[list[int]] = [[] for _ in range(ranks)]
        for stage, rank in enumerate(rank_of):
            if type(rank) is not int:
                rank = require_whole(f"rank_of[{stage}]", rank, error=PlanError)
            if not 0 <= rank < ranks:
                raise PlanError(f"stage {stage} is placed on rank {rank} of {ranks}")
            held[rank].append(stage)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "rank_of", tuple(map(int, rank_of)))
        object.__setattr__(self, "_held", tuple(map(tuple, held)))

    @classmethod
    def linear(cls, ranks: int) -> Placement:
        """One stage per rank."""
        return cls.loop(ranks, 1)

    @classmethod
    def loop(cls, ranks: int, stages_per_rank: int = 2) -> Placement:
        """From the last rank back to the first, round after round."""
        ranks, stages_per_rank = _rectangle(ranks, stages_per_rank)
        return cls(tuple(range(ranks)) * stages_per_rank, ranks)

    @classmethod
    def v(cls, ranks: int, stages_per_rank: int = 2) -> Placement:
        """Down the ranks, then up again: the stages at a turn share a rank."""
        ranks, stages_per_rank = _rectangle(ranks, stages_per_rank)
        down, up = range(ranks), range(ranks)[::-1]
        legs = [up if leg % 2 else down for leg in range(stages_per_rank)]
        return cls(tuple(chain.from_iterable(legs)), ranks)

    @classmethod
    def custom(cls, rank_of: Sequence[int], ranks: int | None = None) -> Placement:
        """Any mapping; by default there are as many ranks as it mentions."""
        given = require_iterable("rank_of", rank_of, error=PlanError)
        if ranks is None:
            each = enumerate(given)
            numbers = [require_whole(f"rank_of[{s}]", rank, error=PlanError) for s, rank in each]
            ranks = max(1, max(numbers, default=0) + 1)
        return cls(tuple(given), ranks)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of)

    @property
    def shape(self) -> str:
        """The numbers of stages and ranks.

        >>> Placement.v(4).shape, Placement.custom([0, 0, 1]).shape
        ('4 ranks × 2 stages', '3 stages on 2 ranks')
        """
        ranks = counted(self.ranks, "rank")
        if len(set(map(len, self._held))) > 1:
            return f"{counted(self.stages, 'stage')} on {ranks}"
        return f"{ranks} × {counted(self.stages // self.ranks, 'stage')}"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        self.require_rank(rank)
        return self._held[rank]

    def require_rank(self, rank: int) -> None:
        """Raise unless there is this rank."""
        if not 0 <= require_whole("rank", rank) < self.ranks:
            raise NoSuchRankError(
                f"there is no rank {shown(rank)}, only {counted(self.ranks, 'rank')} from 0 on"
            )

    def __str__(self) -> str:
        per_rank, rest = divmod(self.stages, self.ranks)
        shape = "custom"
        if not rest:
            if self == Placement.loop(self.ranks, per_rank):
                shape = "linear" if per_rank == 1 else "loop"
            elif self == Placement.v(self.ranks, per_rank):
                shape = "v"
        return f"{shape}, {counted(self.stages, 'stage')} on {counted(self.ranks, 'rank')}"


def _count(name: str, number: int, most: int) -> int:
    return require_whole(name, number, least=1, most=most, error=PlanError)


def _rectangle(ranks: int, stages_per_rank: int) -> tuple[int, int]:
    ranks = _count("ranks", ranks, MOST_RANKS)
    return ranks, _count("stages_per_rank", stages_per_rank, MOST_STAGES // ranks)
