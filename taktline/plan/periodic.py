"""Plans for many micro-batches from those for few: the middle of each rank's word is repeated.

::

    5 micro-batches │ F F F I W F I W F [I W F] I W I W I W
    7 micro-batches │ F F F I W F I W F [I W F] [I W F] [I W F] I W I W I W
"""

from __future__ import annotations

from taktline.plan.work import Order, Work


def unrolled(work: Work, order: Order, *, more: int, at_once: int) -> Order | None:
    """The order with so many ``more`` micro-batches, ``at_once`` in each repetition.

    It is None if a rank's word has no part in the middle with each of its letters equally often.
    """
    longer: Order = []
    for rank, word in enumerate(order):
        kinds = 3 * len(work.placement.stages_of(rank))
        place = _regular(word, kinds, at_once)
        if place is None:
            return None
        end = place + kinds * at_once
        longer.append(word[:end] + word[place:end] * (more // at_once) + word[end:])
    return longer


def _regular(word: list[int], kinds: int, at_once: int) -> int | None:
    """Where a part near the middle begins that has every letter ``at_once`` times."""
    length, middle = kinds * at_once, (len(word) - kinds * at_once) // 2
    for offset in range(max(0, middle) + 1):
        for place in (middle - offset, middle + offset):
            part = word[place : place + length]
            if len(part) == length and all(part.count(letter) == at_once for letter in set(part)):
                return place
    return None
