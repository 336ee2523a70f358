"""Local search: an order is changed along its critical path, and kept if that is no worse.

The critical path consists of blocks: letters that a rank runs without a pause, from one that came
too late from another rank to one that another rank waits for::

    rank 0 │ 0F0 0F1 0F2                     [0I0 0W0 0I1]
    rank 1 │     1F0 1F1          [1W0 1F2 1I0]

A shorter path needs one of these letters elsewhere: before its block, or after it. What that leads
to is first estimated from how long each letter's followers take; most changes end there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from taktline.plan.work import MARGIN, Order, Run, Work, run

_CLOSE = 1e-9
_OFTEN = 100_000
"""After so many letters at the least, ``stop`` is asked again: a turn of a large order is slow."""


def improve(
    work: Work,
    order: Order,
    by_span: bool,
    random: Random,
    *,
    rounds: int,
    heat: float = 0.0,
    stop: Callable[[int], bool] = lambda turn: False,
) -> Order:
    """The best order found in so many rounds, unless ``stop`` ends them.

    At first a change may lengthen the step by about ``heat``; this falls to 0.
    """
    now = _State(work, order, by_span)
    best, least = now.order, now.cost
    often = max(1, min(64, _OFTEN // sum(map(len, order))))
    for turn in range(rounds):
        if not now.blocks or (turn % often == 0 and stop(turn)):
            break
        move = now.draw(random)
        if move is None:
            continue
        limit = now.cost - heat * (1 - turn / rounds) * math.log(1 - random.random()) + _CLOSE
        if now.estimate(move) > limit or not now.allows(move):
            continue
        changed = now.after(move)
        if changed is None or changed.cost > limit:
            continue
        now = changed
        if now.cost < least - _CLOSE:
            best, least = now.order, now.cost
    return best


class _Move(NamedTuple):
    """A letter of a rank to be taken from one place and put into another."""

    rank: int
    source: int
    target: int


class _State:
    """An order with all that is needed to change it."""

    def __init__(self, work: Work, order: Order, by_span: bool, found: Run | None = None) -> None:
        self.work, self.order, self.by_span = work, order, by_span
        ran = found or run(work, order)
        assert ran is not None, "the search begins with an order that runs"
        self.ran = ran
        # What counts of a rank is its end, less its first start if spans are made short.
        self.begins = ran.first if by_span else [0.0] * len(order)
        self.cost = max(end - begin for end, begin in zip(ran.last, self.begins, strict=True))
        self.after_rank, self.after_hop = self._followers()
        self.blocks = self._blocks()

    def draw(self, random: Random) -> _Move | None:
        """A letter of a critical block, and one of its ends or a place within it."""
        rank, first, last = random.choice(self.blocks)
        at, to = random.randint(first, last), random.randint(first, last)
        choice = random.random()
        if choice < 0.35:
            to = first
        elif choice < 0.7:
            to = last
        elif choice < 0.8:
            at = first
        elif choice < 0.9:
            at = last
        word = self.order[rank]
        return None if word[at] == word[to] else _Move(rank, at, to)

    def estimate(self, move: _Move) -> float:
        """The cost of the paths through the letters that a move shifts."""
        rank, source, target = move
        word, time, needed = self.order[rank], self.work.time, self.ran.needed[rank]
        hops = self.after_hop[rank]
        low, high = min(source, target), max(source, target)
        places = list(range(low, high + 1))
        places.insert(target - low, places.pop(source - low))
        now = self.ran.starts[rank][low - 1] + time[word[low - 1]] if low else 0.0
        cost = 0.0
        for place in places:
            now = max(now, needed[place]) + time[word[place]]
            cost = max(cost, now + hops[place])
        if high + 1 == len(word):
            return max(cost, now - self.begins[rank])
        return max(cost, now + time[word[high + 1]] + self.after_rank[rank][high + 1])

    def allows(self, move: _Move) -> bool:
        """Whether F, I and W of each micro-batch stay in this order, and fit into memory."""
        work, count, held = self.work, [0] * (len(self.work.time) + 1), 0.0
        takes, frees, limit = work.takes, work.frees, work.memory[move.rank] * (1 + MARGIN)
        for letter in self._moved(move):
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

    def after(self, move: _Move) -> _State | None:
        """The state after a move; None if the order then locks up."""
        order = self.order[:]
        order[move.rank] = self._moved(move)
        ran = run(self.work, order)
        return ran and _State(self.work, order, self.by_span, ran)

    def _moved(self, move: _Move) -> list[int]:
        word = self.order[move.rank][:]
        word.insert(move.target, word.pop(move.source))
        return word

    def _followers(self) -> tuple[list[list[float]], list[list[float]]]:
        """From the end of each letter to the end of the step: by all paths, and by its message."""
        work, order = self.work, self.order
        time, source, hop = work.time, work.source, work.hop
        paths = [[0.0] * len(word) for word in order]
        messages = [[-math.inf] * len(word) for word in order]
        beyond: list[list[float]] = [[] for _ in time]  # of the readers of each letter, backwards
        number = [0] * len(time)
        place_of = [len(word) for word in order]
        for rank in reversed(self.ran.trace):
            place = place_of[rank] = place_of[rank] - 1
            word, path = order[rank], paths[rank]
            letter = word[place]
            if place + 1 < len(word):
                longest = time[word[place + 1]] + path[place + 1]
            else:
                longest = -self.begins[rank]
            if beyond[letter]:
                message = hop[letter] + beyond[letter][number[letter]]
                number[letter] += 1
                messages[rank][place] = message
                longest = max(longest, message)
            path[place] = longest
            if source[letter] >= 0:
                beyond[source[letter]].append(time[letter] + longest)
        return paths, messages

    def _blocks(self) -> list[tuple[int, int, int]]:
        """The blocks of the critical path with more than one letter: rank, first and last place.

        Without any, all of the path are messages, and no order is better.
        """
        ends = [end - begin for end, begin in zip(self.ran.last, self.begins, strict=True)]
        rank = ends.index(max(ends))
        place = len(self.order[rank]) - 1
        blocks: list[tuple[int, int, int]] = []
        time = self.work.time
        while True:
            word, starts, last = self.order[rank], self.ran.starts[rank], place
            while place and starts[place - 1] + time[word[place - 1]] >= starts[place] - _CLOSE:
                place -= 1
            if place < last:
                blocks.append((rank, place, last))
            letter = word[place]
            source = self.work.source[letter]
            if not place or source < 0:
                return blocks
            number = word[:place].count(letter)
            rank = self.work.rank[source]
            word, place = self.order[rank], -1
            for _ in range(number + 1):
                place = word.index(source, place + 1)
