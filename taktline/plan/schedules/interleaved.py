"""Several stages per rank, taken in turn: interleaved 1F1B and looped BFS."""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import in_rounds, in_slots, rounds


@register("interleaved_1f1b", "interleaved", stages_per_rank=None)
@each_rank
def interleaved_1f1b(rank: int, placement: Placement, microbatches: int) -> Rows:
    """1F1B over several stages per rank: the bubble shrinks by their number.

    interleaved_1f1b: 2 ranks × 2 stages, 2 micro-batches
    rank 0 │ 0F0 0F1 2F0 2F1         2B0────     2B1──── 0B0──── 0B1────
    rank 1 │     1F0 1F1 3F0 3B0──── 3F1 3B1──── 1B0──── 1B1────

    Micro-batches go in rounds of at least p, as even as possible, so that a round is back at rank 0
    when rank 0 needs it.

    Bubble: (p-1)(F+B) in times of one stage, which is 1/v of 1F1B's, where m is a multiple of p.
    Memory: min(v·m, (v-1)·g + 2(p-1-r) + 1) activations of a stage on rank r, for rounds of g.
    Source: Megatron-LM, arXiv 2104.04473.
    """
    ranks, stages = placement.ranks, placement.stages_of(rank)
    turns = rounds(microbatches, at_least=ranks)
    warmup = (len(stages) - 1) * len(turns[0]) + 2 * (ranks - 1 - rank)
    return in_slots(
        (in_rounds(Kind.F, stages, turns), 0),
        (in_rounds(Kind.B, stages[::-1], turns), warmup),
    )


@register("looped_bfs", "bfs", "breadth_first", stages_per_rank=None)
@each_rank
def looped_bfs(rank: int, placement: Placement, microbatches: int) -> Rows:
    """All micro-batches stage by stage: fewest parameter gathers, memory as in GPipe.

    looped_bfs: 2 ranks × 2 stages, 3 micro-batches
    rank 0 │ 0F0 0F1 0F2 2F0 2F1 2F2             2B2──── 2B1──── 2B0──── 0B2──── 0B1──── 0B0────
    rank 1 │     1F0 1F1 1F2 3F0 3F1 3F2 3B2──── 3B1──── 3B0──── 1B2──── 1B1──── 1B0────

    A stage's parameters are used in one go, so a sharded stage is gathered only twice in a step.

    Bubble: (p-1)(F+B) in times of one stage, with at least p micro-batches.
    Memory: v·m activations of a stage.
    Source: arXiv 2211.05953.
    """
    stages, all_at_once = placement.stages_of(rank), rounds(microbatches, at_least=microbatches)
    forward = in_rounds(Kind.F, stages, all_at_once)
    backward = in_rounds(Kind.B, stages, all_at_once)
    return Rows.concatenate([forward, backward[::-1]])
