"""Looped BFS: a rank runs all micro-batches stage by stage (arXiv 2211.05953).

::

    looped_bfs: 2 ranks × 2 stages, 3 micro-batches
    rank 0 │ 0F0 0F1 0F2 2F0 2F1 2F2             2B2──── 2B1──── 2B0──── 0B2──── 0B1──── 0B0────
    rank 1 │     1F0 1F1 1F2 3F0 3F1 3F2 3B2──── 3B1──── 3B0──── 1B2──── 1B1──── 1B0────

A stage's parameters are used in one go, so a sharded stage is gathered only twice in a step.

Bubble: (p-1)(F+B) in times of one stage, with at least p micro-batches.
Memory: v·m activations of a stage, for v stages a rank.
"""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import in_rounds, rounds


@register("looped_bfs", "bfs", "breadth_first", stages_per_rank=None)
@each_rank
def looped_bfs(rank: int, placement: Placement, microbatches: int) -> Rows:
    """All micro-batches stage by stage: fewest parameter gathers, memory as in GPipe."""
    stages, all_at_once = placement.stages_of(rank), rounds(microbatches, at_least=microbatches)
    forward = in_rounds(Kind.F, stages, all_at_once)
    backward = in_rounds(Kind.B, stages, all_at_once)
    return Rows.concatenate([forward, backward[::-1]])
