"""Weight gradients that fill the bubble: ZB-H1, ZB-H2 and interleaved (arXiv 2401.10241).

M is an activation of a stage, and M_w the part of it that W needs.
"""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import in_rounds, in_slots, rounds


@register("zb_h1", "zero_bubble_h1", stages_per_rank=1)
def zb_h1(placement: Placement, microbatches: int) -> list[Rows]:
    """1F1B with weight gradients in the bubble; no more memory than 1F1B.

    zb_h1: 3 ranks × 1 stage, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 │     1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 │         2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    The weights of micro-batch k go into slot k+p-1 on every rank.

    Bubble: (p-1)(F+I-W), where W is no longer than F and I and there are at least p micro-batches.
    Memory: (p-r)·M + r·M_w on rank r: no more than that of 1F1B.
    """
    return interleaved_zero_bubble(placement, microbatches)


@register("zb_h2", "zero_bubble_h2", stages_per_rank=1)
@each_rank
def zb_h2(rank: int, placement: Placement, microbatches: int) -> Rows:
    """Zero bubble for twice the memory of 1F1B.

    zb_h2: 3 ranks × 1 stage, 5 micro-batches
    rank 0 │ 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
    rank 1 │     1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
    rank 2 │         2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4

    As ZB-H1 with twice the warm-up: the weights of micro-batch k go into slot k+2(p-1).

    Bubble: (p-1)(F+I-2W) in each rank's own span, none where F=I=W, with at least 2p-1
    micro-batches. The ranks start and end one after the other, which helps where no barrier
    separates two steps.
    Memory: (2p-2r-1)·M + 2r·M_w on rank r.
    """
    numbers, last = range(microbatches), placement.ranks - 1
    return in_slots(
        (Rows.of(Kind.F, rank, numbers), 0),
        (Rows.of(Kind.I, rank, numbers), 2 * (last - rank)),
        (Rows.of(Kind.W, rank, numbers), 2 * last),
    )


@register("interleaved_zero_bubble", "interleaved_zb", stages_per_rank=None)
@each_rank
def interleaved_zero_bubble(rank: int, placement: Placement, microbatches: int) -> Rows:
    """ZB-H1 over several stages per rank.

    interleaved_zero_bubble: 2 ranks × 2 stages, 2 micro-batches
    rank 0 │ 0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1 │     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    Bubble: (p-1)(F+I-W) in times of one stage, where W is no longer than F and I and m is a
    multiple of p.
    Memory: ((v-1)·g + p-r)·M + r·M_w on rank r, for rounds of g micro-batches.
    """
    ranks, stages = placement.ranks, placement.stages_of(rank)
    turns = rounds(microbatches, at_least=ranks)
    warmup = (len(stages) - 1) * len(turns[0]) + ranks - 1 - rank
    return in_slots(
        (in_rounds(Kind.F, stages, turns), 0),
        (in_rounds(Kind.I, stages[::-1], turns), warmup),
        (in_rounds(Kind.W, stages[::-1], turns), warmup + rank),
    )
