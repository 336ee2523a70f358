"""Forward only: inference and evaluation.

::

    forward_only: 3 ranks × 1 stage, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2 0F3
    rank 1 │     1F0 1F1 1F2 1F3
    rank 2 │         2F0 2F1 2F2 2F3

Bubble: (p-1)·F, in times of one stage, with at least p micro-batches.
Memory: what one forward needs while it runs.
"""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import in_rounds, rounds


@register("forward_only", "inference", stages_per_rank=None)
@each_rank
def forward_only(rank: int, placement: Placement, microbatches: int) -> Rows:
    """All forwards, no backwards: inference and evaluation."""
    turns = rounds(microbatches, at_least=placement.ranks)
    return in_rounds(Kind.F, placement.stages_of(rank), turns)
