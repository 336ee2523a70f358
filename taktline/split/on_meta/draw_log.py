"""A log of random draws that are put off: where each began, so that it can be made later.

A generator stands still while nothing is drawn from it. Here it takes one step for each draw that
is put off, so that every place on its way looks different. A generator that is found elsewhere was
seeded (a state not seen before), or set back to where it had been (a state that was)::

    draw 0 ─ draw 1 ─ seed(7) ─ draw 2 ─ set back ─ draw 3
       └───────┴─────────────────────────────┴────────┘   3 goes on where 1 ended
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

__all__ = ["Draw", "DrawLog"]


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One operation that draws random numbers."""

    generator: torch.Generator
    number: int
    """Which draw of this generator it is, from 1 up."""
    begin: int | torch.Tensor | None
    """None to go on; else after which draw, or from which state."""


class DrawLog:
    """The draws from one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.start = generator.get_state()
        self._place = _digest(self.start)
        self._places = {self._place: 0}
        self._count = 0

    def put_off(self) -> Draw:
        """Note a draw that is not made now."""
        state = self.generator.get_state()
        place = _digest(state)
        begin = None if place == self._place else self._places.get(place, state)
        self._count += 1
        torch.rand((), generator=self.generator)
        self._place = _digest(self.generator.get_state())
        self._places[self._place] = self._count
        return Draw(self.generator, self._count, begin)


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
