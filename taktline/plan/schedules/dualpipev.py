"""DualPipeV: forwards and backwards that overlap, in a V (DeepSeek-V3, arXiv 2412.19437).

::

    dualpipev: 2 ranks × 2 stages, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1────     3F2&0B0──── 3B2────     3F3&0B1──── 3B3 …
    rank 1 │     1F0 2F0 1F1 2F1 1F2 2B0──── 2F2&1B0──── 1F3&2B1──── 2F3&1B1──── 2B2──── 1B2──── …

A forward and a backward that run as one hide each other's communication. With fewer than 2p
micro-batches, the plan is that for 2p, less those that there are not.

Bubble: (p-1)(F&B+B-3W) on the rank at the turn where F=I, F&B being the time of a pair. Other
ranks idle less, the more an overlap saves.
Memory: 2p+1 activations of a stage.
"""

from __future__ import annotations

from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import drop_beyond, play


@register("dualpipev", "dual_pipe_v", stages_per_rank=2, place=Placement.v)
@each_rank
def dualpipev(rank: int, placement: Placement, microbatches: int) -> Rows:
    """Overlapped forward and backward in a V, so that each hides the other's communication."""
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
    return drop_beyond(play(phases, placement.stages_of(rank)), microbatches)
