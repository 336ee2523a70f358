"""Two ways to write a schedule: slot by slot, and phase by phase."""

from __future__ import annotations

import numpy as np

from taktline.plan.action import Kind
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
    words = [(times, _words(pattern)) for times, pattern in phases if times > 0]
    kind, chunk, joined = (
        np.concatenate(
            [np.tile([word[field] for word in pattern], times) for times, pattern in words]
        )
        for field in range(3)
    )
    microbatch = np.empty(len(kind), np.int64)
    backward = np.isin(kind, (Kind.B, Kind.I))
    for number in range(len(stages)):
        of_chunk = chunk == number
        for group in (kind == Kind.F, backward):
            microbatch[of_chunk & group] = np.arange(np.count_nonzero(of_chunk & group))
        started = microbatch[of_chunk & (kind == Kind.I)]
        weights = of_chunk & (kind == Kind.W)
        microbatch[weights] = started[: np.count_nonzero(weights)]
    oldest = np.flatnonzero(chunk < 0)
    halves = np.flatnonzero(kind == Kind.I)[: len(oldest)]
    chunk[oldest], microbatch[oldest] = chunk[halves], microbatch[halves]
    return Rows.of(kind, np.asarray(stages)[chunk], microbatch, joined)


def _words(pattern: str) -> list[tuple[int, int, bool]]:
    """``"F0&B1 W"`` → [(F, 0, joined), (B, 1, not joined), (W, -1, not joined)]."""
    words = pattern.replace("&", "& ").split()
    return [(Kind[word[0]], int(word[1:].rstrip("&") or -1), word[-1] == "&") for word in words]
