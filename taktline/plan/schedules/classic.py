"""The plain schedules: forward only, GPipe and 1F1B."""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.placement import Placement
from taktline.plan.rows import Rows
from taktline.plan.schedules._registry import each_rank, register
from taktline.plan.schedules._shapes import in_rounds, in_slots, rounds


@register("forward_only", "inference", stages_per_rank=None)
@each_rank
def forward_only(rank: int, placement: Placement, microbatches: int) -> Rows:
    """All forwards, no backwards: inference and evaluation.

    forward_only: 3 ranks × 1 stage, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2 0F3
    rank 1 │     1F0 1F1 1F2 1F3
    rank 2 │         2F0 2F1 2F2 2F3

    Bubble: (p-1)·F, in times of one stage, with at least p micro-batches.
    Memory: what one forward needs while it runs.
    """
    turns = rounds(microbatches, at_least=placement.ranks)
    return in_rounds(Kind.F, placement.stages_of(rank), turns)


@register("gpipe", stages_per_rank=1)
@each_rank
def gpipe(rank: int, placement: Placement, microbatches: int) -> Rows:
    """All forwards, then all backwards; memory grows with the micro-batches.

    gpipe: 3 ranks × 1 stage, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2 0F3                         0B0──── 0B1──── 0B2──── 0B3────
    rank 1 │     1F0 1F1 1F2 1F3             1B0──── 1B1──── 1B2──── 1B3────
    rank 2 │         2F0 2F1 2F2 2F3 2B0──── 2B1──── 2B2──── 2B3────

    Bubble: (p-1)(F+B).
    Memory: m activations on every rank, so it grows with the number of micro-batches.
    Source: arXiv 1811.06965.
    """
    numbers = range(microbatches)
    return Rows.concatenate([Rows.of(Kind.F, rank, numbers), Rows.of(Kind.B, rank, numbers)])


@register("1f1b", "one_f_one_b", "pipedream_flush", stages_per_rank=1)
@each_rank
def one_f_one_b(rank: int, placement: Placement, microbatches: int) -> Rows:
    """One forward, one backward in turn; at most p activations on a rank.

    1f1b: 3 ranks × 1 stage, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2                 0B0──── 0F3 0B1────     0B2────     0B3────
    rank 1 │     1F0 1F1         1B0──── 1F2 1B1──── 1F3 1B2────     1B3────
    rank 2 │         2F0 2B0──── 2F1 2B1──── 2F2 2B2──── 2F3 2B3────

    Bubble: (p-1)(F+B).
    Memory: min(m, p-r) activations on rank r, however many micro-batches there are.
    Source: PipeDream-Flush, arXiv 2006.09503.
    """
    numbers = range(microbatches)
    return in_slots(
        (Rows.of(Kind.F, rank, numbers), 0),
        (Rows.of(Kind.B, rank, numbers), placement.ranks - 1 - rank),
    )
