"""A plan: the actions of each rank, in order. It is immutable, without times or tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from taktline.checks import check, check_list, shown
from taktline.errors import NoSuchRankError, PlanError
from taktline.plan.action import LARGEST, Action, Kind, Overlap, parse
from taktline.plan.rows import IntArray, Rows
from taktline.text import counted

MOST_RANKS, MOST_STAGES = 2**16, 2**20
"""A larger number is a typing error, and tables of that size would take too long."""


def render() -> Any:
    """The package that draws, which imports this one: so it is imported when something is drawn."""
    return import_module("taktline.render")


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank holds which stage.

    ::

        linear, 4 ranks     loop, 4 ranks × 2     v, 4 ranks × 2
        rank 0: 0           rank 0: 0 4           rank 0: 0 7
        rank 1: 1           rank 1: 1 5           rank 1: 1 6
        rank 2: 2           rank 2: 2 6           rank 2: 2 5
        rank 3: 3           rank 3: 3 7           rank 3: 3 4

    >>> Placement.v(4).stages_of(1)
    (1, 6)
    """

    rank_of: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        ranks = _count("ranks", self.ranks, MOST_RANKS)
        rank_of = _numbers(self.rank_of)
        for stage, rank in enumerate(rank_of):
            if not 0 <= rank < ranks:
                raise PlanError(f"stage {stage} is placed on rank {rank} of {ranks}")
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "rank_of", rank_of)

    @classmethod
    def linear(cls, ranks: int) -> Placement:
        """One stage per rank."""
        return cls.loop(ranks, 1)

    @classmethod
    def loop(cls, ranks: int, stages_per_rank: int = 2) -> Placement:
        """From the last rank back to the first, round after round."""
        ranks = _count("ranks", ranks, MOST_RANKS)
        turns = _count("stages_per_rank", stages_per_rank, MOST_STAGES // ranks)
        return cls(tuple(range(ranks)) * turns, ranks)

    @classmethod
    def v(cls, ranks: int, stages_per_rank: int = 2) -> Placement:
        """Down the ranks, then up again: the stages at a turn share a rank."""
        loop = cls.loop(ranks, stages_per_rank)
        legs = [range(loop.ranks)[:: -1 if leg % 2 else 1] for leg in range(stages_per_rank)]
        return cls(tuple(chain.from_iterable(legs)), loop.ranks)

    @classmethod
    def custom(cls, rank_of: Sequence[int], ranks: int | None = None) -> Placement:
        """Any mapping; by default there are as many ranks as it mentions."""
        numbers = _numbers(rank_of)
        return cls(numbers, max((0, *numbers)) + 1 if ranks is None else ranks)

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
        if len(set(np.bincount(self.rank_of, minlength=self.ranks))) > 1:
            return f"{counted(self.stages, 'stage')} on {ranks}"
        return f"{ranks} × {counted(self.stages // self.ranks, 'stage')}"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        self.require_rank(rank)
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)

    def require_rank(self, rank: int) -> None:
        """Raise unless there is this rank."""
        if not 0 <= check("rank", rank, int) < self.ranks:
            raise NoSuchRankError(
                f"there is no rank {shown(rank)}, only {counted(self.ranks, 'rank')} from 0 on"
            )

    def __str__(self) -> str:
        per_rank, shape = max(1, self.stages // self.ranks), "custom"
        if self == Placement.loop(self.ranks, per_rank):
            shape = "linear" if per_rank == 1 else "loop"
        elif self == Placement.v(self.ranks, per_rank):
            shape = "v"
        return f"{shape}, {counted(self.stages, 'stage')} on {counted(self.ranks, 'rank')}"


def _count(name: str, number: int, most: int) -> int:
    return check(name, number, int, least=1, most=most, error=PlanError)


def _numbers(rank_of: Iterable[int]) -> tuple[int, ...]:
    ranks = check_list("rank_of", rank_of, error=PlanError)
    _count("the number of stages", len(ranks), MOST_STAGES)
    return tuple(
        check(f"rank_of[{stage}]", rank, int, error=PlanError) for stage, rank in enumerate(ranks)
    )


class Level(IntEnum):
    """The most detailed kind of action in a plan.

    >>> Plan.from_actions([["0F0", "0B0", "0REDUCE_GRAD"]]).level.name
    'SHARDED'
    """

    COMPUTE = 0  # F, B, I, W, RECOMPUTE, overlapped pairs, and copies: OFFLOAD, RELOAD
    SHARDED = 1  # and UNSHARD, RESHARD, REDUCE_GRAD
    LOWERED = 2  # and every SEND and RECV: ready to run


class Drawable:
    """What can be drawn: a plan as it runs if all stages take equally long, or a timeline."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a file in the format of its ending.

        ``.html`` is a page to explore and ``.svg`` a picture. ``.json`` holds a plan or a timeline
        as ``read`` and ``read_timeline`` read it, and ``.csv`` a plan.
        """
        return render().save(self, path)

    def show(self) -> None:
        """Open a page in a browser that draws it; without a browser, print a chart."""
        render().show(self)

    def _repr_svg_(self) -> str | None:
        return render().inline(self)


class Plan(Drawable):
    """The actions of each rank, in order.

    >>> plan = Plan.from_actions([["0F0", "0B0"], ["1F0", "1B0"]])
    >>> plan[1]
    [Action(1F0), Action(1B0)]
    >>> plan.level.name, plan.ranks, plan.stages, plan.microbatches
    ('COMPUTE', 2, 2, 1)
    """

    name: str
    """The schedule or the file that it comes from."""
    placement: Placement
    microbatches: int
    level: Level
    rows: Rows
    """The actions of all ranks, rank after rank."""
    offsets: IntArray
    """Rank r has the rows from ``offsets[r]`` up to ``offsets[r + 1]``."""
    known: dict[str, object]
    """Results that were computed of this plan: it never changes, so neither do they."""
    _kinds: frozenset[int]

    def __init__(
        self,
        rows_by_rank: Sequence[Rows],
        placement: Placement,
        microbatches: int,
        *,
        level: Level | None = None,
        name: str = "custom",
    ) -> None:
        rows_by_rank = check_list("rows_by_rank", rows_by_rank, Rows, error=PlanError)
        check("placement", placement, Placement, error=PlanError)
        microbatches = _count("microbatches", microbatches, LARGEST)
        if level is not None:
            check("level", level, Level, error=PlanError)
        check("name", name, str, error=PlanError)
        if len(rows_by_rank) != placement.ranks:
            raise PlanError(
                f"the placement has {placement.ranks} ranks, but there are actions for "
                f"{len(rows_by_rank)}; pass one list per rank, empty ones too"
            )
        rows = Rows.concatenate(rows_by_rank)
        for column in (rows.kind, rows.stage, rows.microbatch, rows.joined):
            column.flags.writeable = False
        kinds = frozenset(np.flatnonzero(np.bincount(rows.kind)).tolist())
        found = max([level or Level.COMPUTE, *(_LEVEL_OF_KIND[kind] for kind in kinds)])
        if level is not None and level < found:
            kind = Kind(next(kind for kind in rows.kind.tolist() if _LEVEL_OF_KIND[kind] == found))
            raise PlanError(f"a {level.name} plan may not contain {kind.name}")
        offsets = np.cumsum([0, *map(len, rows_by_rank)])
        vars(self).update(name=name, placement=placement, microbatches=microbatches, level=found)
        vars(self).update(rows=rows, offsets=offsets, known={}, _kinds=kinds)

    @classmethod
    def from_actions(
        cls,
        actions: Sequence[Iterable[Action | Overlap | str]],
        placement: Placement | None = None,
        microbatches: int | None = None,
        *,
        level: Level | None = None,
        name: str = "custom",
    ) -> Plan:
        """A plan from one list of actions (or their texts) per rank.

        By default, a stage is on the rank that first computes it, and the micro-batches go up to
        the highest number in the actions.
        """
        rows = [
            Rows.from_actions(map(_as_action, check_list(f"actions[{rank}]", listed)))
            for rank, listed in enumerate(check_list("actions", actions, error=PlanError))
        ]
        if not any(map(len, rows)):
            raise PlanError("a plan without actions: pass at least one forward")
        if placement is None:
            placement = _infer_placement(rows)
        if microbatches is None:
            microbatches = max(int(part.microbatch.max(initial=-1)) for part in rows) + 1
        return cls(rows, placement, microbatches, level=level, name=name)

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError(f"a plan does not change; make a new one to set {attribute!r}")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    def rows_of(self, rank: int) -> Rows:
        """The actions of one rank as columns."""
        self.placement.require_rank(rank)
        return self.rows[int(self.offsets[rank]) : int(self.offsets[rank + 1])]

    def rank_of_rows(self) -> IntArray:
        """The rank of each row."""
        return np.repeat(np.arange(self.ranks, dtype=np.int32), np.diff(self.offsets))

    def has(self, *kinds: Kind) -> bool:
        """Whether any action is of one of these kinds."""
        return not self._kinds.isdisjoint(kinds)

    @property
    def saves_memory(self) -> bool:
        """Whether it offloads or recomputes activations."""
        return self.has(Kind.RECOMPUTE, Kind.OFFLOAD)

    def with_rows(self, rows_by_rank: Sequence[Rows], level: Level | None = None) -> Plan:
        """The same plan with other actions."""
        return Plan(rows_by_rank, self.placement, self.microbatches, level=level, name=self.name)

    def digest(self) -> str:
        """A hash of all that matters for running, which ranks compare before a step."""
        digest = hashlib.sha256()
        digest.update(repr((self.placement, self.microbatches, int(self.level))).encode())
        for column in (self.offsets, self.rows.kind, self.rows.stage, self.rows.microbatch):
            digest.update(column.astype("<i8").tobytes())
        digest.update(self.rows.joined.tobytes())
        return digest.hexdigest()

    def __getitem__(self, rank: int) -> list[Action | Overlap]:
        if -self.ranks <= check("rank", rank, int) < 0:
            rank += self.ranks
        return list(self.rows_of(rank).actions())

    def __len__(self) -> int:
        """How many actions there are, an overlapped pair being one."""
        return len(self.rows) - int(self.rows.joined.sum())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return (
            f"Plan({self.name!r}, {self.level.name}, {self.placement}, "
            f"{counted(self.microbatches, 'micro-batch')}, {counted(len(self), 'action')})"
        )

    def __str__(self) -> str:
        return render().grid(self)


def _as_action(item: object) -> Action | Overlap:
    if isinstance(item, str):
        return parse(item)
    if not isinstance(item, (Action, Overlap)):
        raise PlanError(f"an action is an Action, an Overlap or a text, not {shown(item)}")
    return item


# In the order of the kinds: those that compute or copy, that communicate, and of whole stages.
_LEVEL_OF_KIND = [Level.COMPUTE] * 7 + [Level.LOWERED] * 4 + [Level.SHARDED] * 3


def _infer_placement(rows_by_rank: Sequence[Rows]) -> Placement:
    """A stage lies on the rank that first computes with it."""
    rank_of: dict[int, int] = {}
    for rank, rows in enumerate(rows_by_rank):
        for stage in np.unique(rows.stage[rows.kind <= Kind.W]).tolist():
            rank_of.setdefault(stage, rank)
    missing = next(stage for stage in range(len(rank_of) + 1) if stage not in rank_of)
    if missing == 0 or missing < len(rank_of):
        raise PlanError(
            f"no rank computes stage {missing}, so its rank is unknown; pass a placement"
        )
    return Placement.custom([rank_of[stage] for stage in range(missing)], len(rows_by_rank))
