"""Orders of schedules: dictionaries of what each rank does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from taktline.compat.torch_pipelining.schedules import _Action
from taktline.plan import build

__all__ = ["Order", "order_of", "placement_of"]

Order: TypeAlias = dict[int, list[Any]]
"""Actions by rank; a None is a rank that waits."""


def order_of(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Order:
    """What the plan of a name has each rank compute.

    >>> order_of("gpipe", 2, 1, 1)
    {0: [0F0, 0B0], 1: [1F0, 1B0]}
    """
    plan = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return {rank: [_Action.from_str(str(a)) for a in plan[rank]] for rank in range(ranks)}


def placement_of(order: Mapping[int, Sequence[Any]]) -> dict[int, int]:
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
