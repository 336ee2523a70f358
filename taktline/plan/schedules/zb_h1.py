"""ZB-H1: 1F1B whose weight gradients fill the bubble (Zero Bubble, arXiv 2401.10241).

::

    zb_h1: 3 ranks × 1 stage, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 │     1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 │         2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

The weights of micro-batch k go into slot k+p-1 on every rank.

Bubble: (p-1)(F+I-W), where W is no longer than F and I and there are at least p micro-batches.
Memory: (p-r)·M + r·M_w on rank r, M being an activation and M_w what W needs of it: no more than
that of 1F1B.
"""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import in_slots


@register("zb_h1", "zero_bubble_h1", stages_per_rank=1)
@each_rank
def zb_h1(rank: int, placement: Placement, microbatches: int) -> Rows:
    """1F1B with weight gradients in the bubble; no more memory than 1F1B."""
    numbers, last = range(microbatches), placement.ranks - 1
    return in_slots(
        (Rows.of(Kind.F, rank, numbers), 0),
        (Rows.of(Kind.I, rank, numbers), last - rank),
        (Rows.of(Kind.W, rank, numbers), last),
    )
