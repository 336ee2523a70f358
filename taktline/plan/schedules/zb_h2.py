"""ZB-H2: twice the memory of 1F1B, and almost no bubble (Zero Bubble, arXiv 2401.10241).

::

    zb_h2: 3 ranks × 1 stage, 5 micro-batches
    rank 0 │ 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
    rank 1 │     1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
    rank 2 │         2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4

As ZB-H1 with twice the warm-up: the weights of micro-batch k go into slot k+2(p-1) on every rank.

Bubble: (p-1)(F+I-2W) in each rank's own span, none where F=I=W, with at least 2p-1 micro-batches.
The ranks start and end one after the other, which is of use where nothing holds all of them
together between two steps.
Memory: (2p-2r-1)·M + 2r·M_w on rank r, M being an activation and M_w what W needs of it.
"""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import in_slots


@register("zb_h2", "zero_bubble_h2", stages_per_rank=1)
@each_rank
def zb_h2(rank: int, placement: Placement, microbatches: int) -> Rows:
    """Zero bubble for twice the memory of 1F1B."""
    numbers, last = range(microbatches), placement.ranks - 1
    return in_slots(
        (Rows.of(Kind.F, rank, numbers), 0),
        (Rows.of(Kind.I, rank, numbers), 2 * (last - rank)),
        (Rows.of(Kind.W, rank, numbers), 2 * last),
    )
