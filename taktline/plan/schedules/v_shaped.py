"""Two stages per rank in a V: ZB-V and DualPipeV."""

from __future__ import annotations

from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import play


@register("zbv", "zb_v", "zbv_zero_bubble", stages_per_rank=2, place=Placement.v)
@each_rank
def zbv(rank: int, placement: Placement, microbatches: int) -> Rows:
    """Zero bubble at the memory of 1F1B, with two stages per rank in a V.

    zbv: 2 ranks × 2 stages, 3 micro-batches
    rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1 │     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Bubble: none in each rank's own span where F=I=W, with at least 2p-1 micro-batches.
    Memory: 2p activations of a stage, each half as large as one of 1F1B's p.
    Source: Zero Bubble, arXiv 2401.10241, section 6.
    """
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
    return play(phases, placement.stages_of(rank)).before(microbatches)


@register("dualpipev", "dual_pipe_v", stages_per_rank=2, place=Placement.v)
@each_rank
def dualpipev(rank: int, placement: Placement, microbatches: int) -> Rows:
    """Overlapped forward and backward in a V, so that each hides the other's communication.

    dualpipev: 2 ranks × 2 stages, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1────     3F2&0B0──── 3B2────     3F3&0B1──── 3B3 …
    rank 1 │     1F0 2F0 1F1 2F1 1F2 2B0──── 2F2&1B0──── 1F3&2B1──── 2F3&1B1──── 2B2──── 1B2──── …

    With fewer than 2p micro-batches, the plan is that for 2p without the missing ones.

    Bubble: (p-1)(F&B+B-3W) on the rank at the turn where F=I, F&B being the time of a pair. Other
    ranks idle less, the more an overlap saves.
    Memory: 2p+1 activations of a stage.
    Source: DeepSeek-V3, arXiv 2412.19437.
    """
    ranks = placement.ranks
    count = max(microbatches, 2 * ranks)
    to_turn, half = ranks - 1 - rank, (rank + 1) // 2
    steady = count - 2 * ranks + rank + 1
    at_turn = to_turn == 0  # the turning rank has nothing to hide its first pair behind
    phases = [
        (2 * to_turn, "F0"),
        (rank + 1, "F0 F1"),
        (to_turn, "I1 W F1"),
        (at_turn, "F0 B1 F1&B0"),
        (steady - at_turn, "F0&B1 F1&B0"),
        (to_turn, "B1 F1&B0"),
        (half, "B1 B0"),
        (rank % 2 == 0, "B1 I0"),
        (half, "I1 I0"),
        (to_turn, "W I0"),
        (rank + 1, "W"),
    ]
    return play(phases, placement.stages_of(rank)).before(microbatches)
