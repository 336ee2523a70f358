"""ZB-V: two stages a rank in a V, and no bubble (Zero Bubble, arXiv 2401.10241, section 6).

::

    zbv: 2 ranks × 2 stages, 3 micro-batches
    rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1 │     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

Bubble: none in each rank's own span where F=I=W, with at least 2p-1 micro-batches.
Memory: 2p activations of a stage, each half as large as one of 1F1B's p.
"""

from __future__ import annotations

from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import drop_beyond, play


@register("zbv", "zb_v", "zbv_zero_bubble", stages_per_rank=2, place=Placement.v)
@each_rank
def zbv(rank: int, placement: Placement, microbatches: int) -> Rows:
    """Zero bubble at the memory of 1F1B, with two stages a rank in a V."""
    ranks = placement.ranks
    count = max(microbatches, 2 * ranks - 1)  # what fills the V; fewer leave gaps in it
    to_turn = ranks - rank
    phases = [
        (2 * to_turn - 1, "F0"),
        (rank, "F1 F0"),
        (to_turn, "F1 I1 W1"),
        (count - 2 * ranks + 1 + rank, "F0 I0 W0 F1 I1 W1"),
        (to_turn - 1, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (to_turn, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]
    return drop_beyond(play(phases, placement.stages_of(rank)), microbatches)
