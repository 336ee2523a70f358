"""The shape of a plan in words."""

from __future__ import annotations

from taktline.plan.plan import Plan
from taktline.plan.words import counted

__all__ = ["shape"]


def shape(plan: Plan) -> str:
    """How many stages lie on how many ranks.

    >>> from taktline.plan import build
    >>> shape(build("zbv", ranks=4, microbatches=8))
    '4 ranks × 2 stages'
    >>> shape(Plan.from_actions([["0F0", "1F0"], ["2F0"]]))
    '3 stages on 2 ranks'
    """
    ranks = counted(plan.ranks, "rank")
    if len({len(plan.placement.stages_of(rank)) for rank in range(plan.ranks)}) > 1:
        return f"{counted(plan.stages, 'stage')} on {ranks}"
    return f"{ranks} × {counted(plan.stages // plan.ranks, 'stage')}"
