"""Interleaved zero bubble: ZB-H1 over several stages a rank (arXiv 2401.10241).

::

    interleaved_zero_bubble: 2 ranks × 2 stages, 2 micro-batches
    rank 0 │ 0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1 │     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

Bubble: (p-1)(F+I-W) in times of one stage, where W is no longer than F and I and m is a multiple
of p.
Memory: ((v-1)·g + p-r)·M + r·M_w on rank r, for v stages a rank and rounds of g micro-batches, M
being an activation of a stage and M_w what W needs of it.
"""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import in_rounds, in_slots, rounds


@register("interleaved_zero_bubble", "interleaved_zb", stages_per_rank=None)
@each_rank
def interleaved_zero_bubble(rank: int, placement: Placement, microbatches: int) -> Rows:
    """ZB-H1 over several stages a rank."""
    ranks, stages = placement.ranks, placement.stages_of(rank)
    turns = rounds(microbatches, at_least=ranks)
    warmup = (len(stages) - 1) * len(turns[0]) + ranks - 1 - rank
    return in_slots(
        (in_rounds(Kind.F, stages, turns), 0),
        (in_rounds(Kind.I, stages[::-1], turns), warmup),
        (in_rounds(Kind.W, stages[::-1], turns), warmup + rank),
    )
