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
from dataclasses import dataclass

from taktline.errors import PlanError
from taktline.plan.words import counted

__all__ = ["Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Stage → rank, and back.

    >>> Placement.v(4).stages_of(1)
    (1, 6)
    """

    rank_of: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise PlanError(f"a pipeline needs at least one rank, not {self.ranks}")
        if not self.rank_of:
            raise PlanError("a pipeline needs at least one stage")
        for stage, rank in enumerate(self.rank_of):
            if not 0 <= rank < self.ranks:
                raise PlanError(f"stage {stage} is placed on rank {rank} of {self.ranks}")

    @classmethod
    def linear(cls, ranks: int) -> Placement:
        """One stage a rank."""
        return cls.loop(ranks, 1)

    @classmethod
    def loop(cls, ranks: int, stages_per_rank: int = 2) -> Placement:
        """From the last rank back to the first, round after round."""
        return cls(tuple(range(ranks)) * stages_per_rank, ranks)

    @classmethod
    def v(cls, ranks: int, stages_per_rank: int = 2) -> Placement:
        """Down the ranks, then up again: the stages at a turn share a rank."""
        down, up = tuple(range(ranks)), tuple(reversed(range(ranks)))
        legs = [up if leg % 2 else down for leg in range(stages_per_rank)]
        return cls(sum(legs, ()), ranks)

    @classmethod
    def custom(cls, rank_of: Sequence[int], ranks: int | None = None) -> Placement:
        """Any mapping; ``ranks`` defaults to what it mentions."""
        return cls(tuple(rank_of), max(rank_of, default=-1) + 1 if ranks is None else ranks)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def __str__(self) -> str:
        per_rank, rest = divmod(self.stages, self.ranks)
        shape = "custom"
        if not rest:
            if self == Placement.loop(self.ranks, per_rank):
                shape = "linear" if per_rank == 1 else "loop"
            elif self == Placement.v(self.ranks, per_rank):
                shape = "v"
        return f"{shape}, {counted(self.stages, 'stage')} on {counted(self.ranks, 'rank')}"
