"""Local search: an order is changed along its critical path, and kept if that is no worse.

The critical path consists of blocks: letters that a rank runs without a pause, from one that came
too late from another rank to one that another rank waits for::

    rank 0 │ 0F0 0F1 0F2                     [0I0 0W0 0I1]
    rank 1 │     1F0 1F1          [1W0 1F2 1I0]

A shorter path needs one of these letters elsewhere: before its block, or after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from taktline.plan.work import MARGIN, Order, Run, Work, run

Score = Callable[[Run], float]


def improve(
    work: Work,
    order: Order,
    score: Score,
    random: Random,
    *,
    rounds: int,
    heat: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[float, Order]:
    """The best order found in so many rounds, with its score.

    At first a change may lengthen the step by about ``heat``; this falls to 0.
    """
    found = run(work, order)
    assert found is not None
    now, order = score(found), [list(word) for word in order]
    best, best_order = now, order[:]
    for turn in range(rounds):
        if turn % 64 == 0 and stop():
            break
        moved = _move(work, order, found, random)
        if moved is None:
            continue
        rank, word = moved
        kept, order[rank] = order[rank], word
        changed = run(work, order)
        allowed = -heat * (1 - turn / rounds) * math.log(1 - random.random())
        if changed is None or score(changed) > now + allowed + 1e-9:
            order[rank] = kept
            continue
        found, now = changed, score(changed)
        if now < best - 1e-9:
            best, best_order = now, order[:]
    return best, best_order


def _move(work: Work, order: Order, found: Run, random: Random) -> tuple[int, list[int]] | None:
    """A rank with its new word: a letter of a critical block is moved to one of its ends."""
    blocks = _blocks(work, order, found)
    rank, first, last = blocks[random.randrange(len(blocks))]
    if first == last:
        return None
    word = order[rank]
    at = random.randrange(first, last + 1)
    choice = random.random()
    if choice < 0.4:
        to = first
    elif choice < 0.8:
        to = last
    else:
        to = random.randrange(first, last + 1)
    if random.random() < 0.3:
        at, to = (last, to) if to < last else (first, to)
    if at == to:
        return None
    word = word[:]
    letter = word.pop(at)
    word.insert(to, letter)
    return (rank, word) if _is_legal(work, rank, word) else None


def _is_legal(work: Work, rank: int, word: list[int]) -> bool:
    """Whether F, I and W of each micro-batch come in this order, and fit into memory."""
    takes, frees, limit = work.takes, work.frees, work.memory[rank] * (1 + MARGIN)
    count = [0] * (len(work.time) + 1)
    held = 0.0
    for letter in word:
        count[letter] += 1
        if letter % 3:
            if count[letter] > count[letter - 1]:
                return False
            held -= frees[letter]
        else:
            held += takes[letter]
            if held > limit:
                return False
    return True


def _blocks(work: Work, order: Order, found: Run) -> list[tuple[int, int, int]]:
    """The critical path of the rank with the longest span, backwards: (rank, first, last)."""
    spans = [last - first for first, last in zip(found.first, found.last, strict=True)]
    rank = spans.index(max(spans))
    place = len(order[rank]) - 1
    blocks: list[tuple[int, int, int]] = []
    time = work.time
    while True:
        word, starts, last = order[rank], found.starts[rank], place
        while place and starts[place - 1] + time[word[place - 1]] >= starts[place] - 1e-9:
            place -= 1
        blocks.append((rank, place, last))
        letter = word[place]
        source = work.source[letter]
        if not place or source < 0:
            return blocks
        number = word[:place].count(letter)
        rank = work.rank[source]
        word, place = order[rank], -1
        for _ in range(number + 1):
            place = word.index(source, place + 1)
