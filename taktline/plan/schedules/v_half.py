"""V-Half: half of the memory of 1F1B (Controllable Memory, arXiv 2405.15362).

::

    v_half: 4 ranks × 2 stages, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2                 7F0 7I0 7F1 0F3 7I1 7W0 7F2 7W1 0I0 7I2 0W0 7W2 7F3 7I3 …
    rank 1 │     1F0 1F1 1F2         6F0     6F1 6I0 6W0 1F3 6F2 6I1 1I0 6W1 1W0 6I2 6F3 6W2 1I1 …
    rank 2 │         2F0 2F1     5F0 2F2 5F1     5F2 5I0 5W0 2F3 2I0 5I1 2W0 5W1 5F3 5I2 2I1 5W2 …
    rank 3 │             3F0 4F0 3F1 4F1 3F2 4F2         4I0 3I0 4W0 3F3 3W0 4F3 4I1 3I1 4I2 3I2 …

Bubble: at most max(0, 6p-3k-1) in each rank's own span, where F=I=W=1 and there are at least 2p
micro-batches; 1F1B's is 6(p-1) in these units.
Memory: at most k = 2·((p+2)//2) activations of a stage, where 1F1B holds the equal of 2p.
"""

from __future__ import annotations

from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import register
from taktline.plan.schedules._v_limited import v_limited


@register("v_half", stages_per_rank=2, place=Placement.v)
def v_half(placement: Placement, microbatches: int) -> list[Rows]:
    """Half of 1F1B's memory and half of its bubble, with two stages a rank in a V."""
    return v_limited(placement, microbatches, limit=2 * ((placement.ranks + 2) // 2))
