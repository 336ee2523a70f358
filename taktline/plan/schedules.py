"""The schedules: for given numbers, the actions of each rank in order.

docs/schedules.md has the bubble, the memory and the paper of each. The commands list schedules in
the order of this file.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from taktline.plan.action import Kind
from taktline.plan.plan import Placement
from taktline.plan.registry import each_rank, register
from taktline.plan.rows import IntArray, Rows


def in_slots(*parts: tuple[Rows, int]) -> Rows:
    """Merge sequences that take one slot after the other, each from a slot of its own on.

    Within a slot, the parts run in the order in which they are given.

    >>> forward, backward = Rows.of(Kind.F, 0, range(3)), Rows.of(Kind.B, 0, range(3))
    >>> " ".join(map(str, in_slots((forward, 0), (backward, 1)).actions()))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    slots = np.concatenate([np.arange(len(rows)) + first for rows, first in parts])
    rows = Rows.concatenate([rows for rows, _ in parts])
    return rows[np.argsort(slots, kind="stable")]


def rounds(microbatches: int, at_least: int) -> list[IntArray]:
    """Micro-batches in rounds of at least so many, as even as can be, larger ones first.

    >>> [list(map(int, numbers)) for numbers in rounds(5, at_least=2)]
    [[0, 1, 2], [3, 4]]
    """
    return np.array_split(np.arange(microbatches), max(1, microbatches // at_least))


def in_rounds(kind: Kind, stages: tuple[int, ...], rounds: list[IntArray]) -> Rows:
    """A rank's stages in turn, each for one round of micro-batches before the next takes over.

    >>> rows = in_rounds(Kind.F, (0, 4), rounds(5, at_least=2))
    >>> " ".join(map(str, rows.actions()))
    '0F0 0F1 0F2 4F0 4F1 4F2 0F3 0F4 4F3 4F4'
    """
    return Rows.concatenate(
        [Rows.of(kind, stage, numbers) for numbers in rounds for stage in stages]
    )


def play(phases: list[tuple[int, str]], stages: tuple[int, ...]) -> Rows:
    """Spell out phases: (how often, pattern of kind and chunk), micro-batches counted as they come.

    Chunk c is ``stages[c]``. Every word takes the next micro-batch of its chunk: F the next
    forward, B and I the next backward, W the next whose I has run; W without a chunk is the oldest
    I whose W is still to come. ``F0&B1`` is an overlapped pair.

    >>> rows = play([(2, "F0"), (1, "F0&B1"), (1, "I1"), (1, "W")], stages=(0, 3))
    >>> " ".join(map(str, rows.actions()))
    '0F0 0F1 (0F2;3B0)OVERLAP_F_B 3I1 3W1'
    """
    begun = {kind: [0] * len(stages) for kind in (Kind.F, Kind.I)}
    weights: list[tuple[int, int]] = []  # (chunk, micro-batch) of each W whose I has run
    rows: list[tuple[Kind, int, int, bool]] = []
    for times, pattern in phases:
        for word in pattern.replace("&", "& ").split() * times:
            kind, chunk = Kind[word[0]], int(word[1:].rstrip("&") or -1)
            if kind is Kind.W:
                oldest = next(at for at, (of, _) in enumerate(weights) if chunk in (of, -1))
                chunk, microbatch = weights.pop(oldest)
            else:
                numbers = begun[Kind.F if kind is Kind.F else Kind.I]
                microbatch = numbers[chunk]
                numbers[chunk] += 1
            if kind is Kind.I:
                weights.append((chunk, microbatch))
            rows.append((kind, stages[chunk], microbatch, word[-1] == "&"))
    return Rows.of(*zip(*rows, strict=True))


@register("forward_only", "inference", stages_per_rank=None)
@each_rank
def forward_only(rank: int, placement: Placement, microbatches: int) -> Rows:
    """All forwards, no backwards: inference and evaluation.

    forward_only: 3 ranks × 1 stage, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2 0F3
    rank 1 │     1F0 1F1 1F2 1F3
    rank 2 │         2F0 2F1 2F2 2F3
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
    """
    numbers = range(microbatches)
    return in_slots(
        (Rows.of(Kind.F, rank, numbers), 0),
        (Rows.of(Kind.B, rank, numbers), placement.ranks - 1 - rank),
    )


@register("interleaved_1f1b", "interleaved", stages_per_rank=None)
@each_rank
def interleaved_1f1b(rank: int, placement: Placement, microbatches: int) -> Rows:
    """1F1B over several stages per rank: the bubble shrinks by their number.

    interleaved_1f1b: 2 ranks × 2 stages, 2 micro-batches
    rank 0 │ 0F0 0F1 2F0 2F1         2B0────     2B1──── 0B0──── 0B1────
    rank 1 │     1F0 1F1 3F0 3B0──── 3F1 3B1──── 1B0──── 1B1────

    Micro-batches go in rounds of at least p, as even as possible, so that a round is back at rank 0
    when rank 0 needs it.
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
    """
    stages, all_at_once = placement.stages_of(rank), rounds(microbatches, at_least=microbatches)
    forward = in_rounds(Kind.F, stages, all_at_once)
    backward = in_rounds(Kind.B, stages, all_at_once)
    return Rows.concatenate([forward, backward[::-1]])


@register("zb_h1", "zero_bubble_h1", stages_per_rank=1)
def zb_h1(placement: Placement, microbatches: int) -> list[Rows]:
    """1F1B with weight gradients in the bubble; no more memory than 1F1B.

    zb_h1: 3 ranks × 1 stage, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 │     1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 │         2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    The weights of micro-batch k go into slot k+p-1 on every rank.
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
    """
    ranks, stages = placement.ranks, placement.stages_of(rank)
    turns = rounds(microbatches, at_least=ranks)
    warmup = (len(stages) - 1) * len(turns[0]) + ranks - 1 - rank
    return in_slots(
        (in_rounds(Kind.F, stages, turns), 0),
        (in_rounds(Kind.I, stages[::-1], turns), warmup),
        (in_rounds(Kind.W, stages[::-1], turns), warmup + rank),
    )


@register("zbv", "zb_v", "zbv_zero_bubble", stages_per_rank=2, place=Placement.v)
@each_rank
def zbv(rank: int, placement: Placement, microbatches: int) -> Rows:
    """Zero bubble at the memory of 1F1B, with two stages per rank in a V.

    zbv: 2 ranks × 2 stages, 3 micro-batches
    rank 0 │ 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1 │     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
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


_PERIOD = 6  # F, I and W of two stages
_TURN = 3  # units between F and I of the last stage in the pattern


def v_limited(placement: Placement, microbatches: int, limit: int) -> list[Rows]:
    """All ranks' actions, with at most ``limit`` activations on a rank, from V-Min's number up.

    A plain greedy choice fills the memory with forwards that then wait for one another. So each
    action gets a due time from a pattern that repeats every period, the work of one micro-batch on
    a rank. A rank runs what is due first; while that cannot run yet, it does a pending W; failing
    that, it runs ahead of the pattern, by one period at most. So the pattern is kept where all
    ranks are busy, and the gaps of warm-up and cool-down are filled.

    The limit holds whatever the actions cost: it follows from the order on each rank alone, where
    an activation counts from its F to its W. The order never locks up: a rank's first stage leaves
    room for its second, so the oldest micro-batch under way can always go on.
    """
    ranks, last = placement.ranks, placement.stages - 1
    if limit >= 2 * ranks:
        return zbv(placement, microbatches)
    # Due times of micro-batch 0, in whole numbers. It moves one rank in a unit on the way down,
    # and takes somewhat longer on the way up. Both stages of a rank then hold its activations
    # for 4·ranks + 2·_TURN units and twice the whole stretch together, which is the memory in
    # use times the period: the stretch is what the limit leaves over.
    unit = max(1, ranks - 1)
    up = unit + max(0, 3 * limit - 2 * ranks - 4 - _TURN)
    forward_due = [*range(0, unit * ranks, unit), *(unit * ranks + up * r for r in range(ranks))]
    at_loss, period = forward_due[-1] + unit * (1 + _TURN), _PERIOD * unit
    input_due = [at_loss + due for due in forward_due[::-1]]
    forward, inputs, weights = ([0] * (2 * ranks) for _ in range(3))  # the micro-batches through
    pending: list[deque[int]] = [deque() for _ in range(ranks)]  # the stage of each W
    actions: list[list[tuple[Kind, int, int]]] = [[] for _ in range(ranks)]

    def ready(kind: Kind, stage: int) -> bool:
        if kind is Kind.I:
            from_next = stage == last or inputs[stage + 1] > inputs[stage]
            return from_next and forward[stage] > inputs[stage]
        if stage > 0 and forward[stage - 1] <= forward[stage]:
            return False
        here, other = (forward[each] - weights[each] for each in (stage, last - stage))
        first = stage < ranks  # which leaves room for the rank's second stage
        return here + other < limit and not (first and here >= limit - 1)

    def choose(rank: int, reach: float) -> tuple[Kind, int] | None:
        # Of two that are due at once, the later in a micro-batch's life goes first.
        life = [(Kind.I, rank), (Kind.I, last - rank), (Kind.F, last - rank), (Kind.F, rank)]
        queue: list[tuple[int, int]] = []
        for place, (kind, stage) in enumerate(life):
            due, through = (input_due, inputs) if kind is Kind.I else (forward_due, forward)
            if through[stage] < microbatches:
                queue.append((due[stage] + period * through[stage], place))
        queue.sort()
        for due, place in queue[:1] if pending[rank] else queue:
            if due <= queue[0][0] + reach and ready(*life[place]):
                return life[place]
        return (Kind.W, pending[rank][0]) if pending[rank] else None

    reach: float = period
    while any(len(done) < _PERIOD * microbatches for done in actions):
        # All ranks choose, then all run. If no rank can move, the pattern is in the way.
        choices = [choose(rank, reach) for rank in range(ranks)]
        for rank, (kind, stage) in [(r, choice) for r, choice in enumerate(choices) if choice]:
            through = {Kind.F: forward, Kind.I: inputs, Kind.W: weights}[kind]
            actions[rank].append((kind, stage, through[stage]))
            through[stage] += 1
            if kind is Kind.I:
                pending[rank].append(stage)
            elif kind is Kind.W:
                pending[rank].popleft()
        reach = period if any(choices) else math.inf
    return [Rows.of(*np.array(listed, np.int64).T) for listed in actions]


@register("v_half", stages_per_rank=2, place=Placement.v)
def v_half(placement: Placement, microbatches: int) -> list[Rows]:
    """Half of 1F1B's memory and half of its bubble, with two stages per rank in a V.

    v_half: 4 ranks × 2 stages, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2                 7F0 7I0 7F1 0F3 7I1 7W0 7F2 7W1 0I0 7I2 0W0 7W2 7F3 7I3 …
    rank 1 │     1F0 1F1 1F2         6F0     6F1 6I0 6W0 1F3 6F2 6I1 1I0 6W1 1W0 6I2 6F3 6W2 1I1 …
    rank 2 │         2F0 2F1     5F0 2F2 5F1     5F2 5I0 5W0 2F3 2I0 5I1 2W0 5W1 5F3 5I2 2I1 5W2 …
    rank 3 │             3F0 4F0 3F1 4F1 3F2 4F2         4I0 3I0 4W0 3F3 3W0 4F3 4I1 3I1 4I2 3I2 …
    """
    return v_limited(placement, microbatches, limit=2 * ((placement.ranks + 2) // 2))


@register("v_min", stages_per_rank=2, place=Placement.v)
def v_min(placement: Placement, microbatches: int) -> list[Rows]:
    """A third of 1F1B's memory and two thirds of its bubble, with two stages per rank in a V.

    v_min: 4 ranks × 2 stages, 4 micro-batches
    rank 0 │ 0F0 0F1 0F2                 7F0 7I0 7W0         7F1 7I1 7W1 0I0 0W0 0F3     7F2 7I2 …
    rank 1 │     1F0 1F1             6F0 1F2     6I0 6W0 6F1         1I0 6I1 1W0 6W1 6F2 1F3 1I1 …
    rank 2 │         2F0 2F1     5F0     5F1         5I0 5W0 2F2 2I0 2W0     5I1 5F2 5W1 2I1 2F3 …
    rank 3 │             3F0 4F0 3F1 4F1                 4I0 3I0 4W0 3F2 3W0 4F2 4I1 3I1 4W1 3W1 …
    """
    return v_limited(placement, microbatches, limit=2 * ((placement.ranks + 4) // 3))
