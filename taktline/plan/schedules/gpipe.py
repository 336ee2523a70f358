"""GPipe: all forwards, then all backwards (arXiv 1811.06965).

::

    gpipe: 3 ranks × 1 stage, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2 0F3                         0B0──── 0B1──── 0B2──── 0B3────
    rank 1 │     1F0 1F1 1F2 1F3             1B0──── 1B1──── 1B2──── 1B3────
    rank 2 │         2F0 2F1 2F2 2F3 2B0──── 2B1──── 2B2──── 2B3────

Bubble: (p-1)(F+B).
Memory: m activations on every rank, so it grows with the number of micro-batches.
"""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register


@register("gpipe", stages_per_rank=1)
@each_rank
def gpipe(rank: int, placement: Placement, microbatches: int) -> Rows:
    """All forwards, then all backwards; memory grows with the micro-batches."""
    numbers = range(microbatches)
    return Rows.concatenate([Rows.of(Kind.F, rank, numbers), Rows.of(Kind.B, rank, numbers)])
