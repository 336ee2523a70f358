"""Texts of single actions."""

from __future__ import annotations

from random import Random

from taktline.plan import Kind, parse
from tests.fuzz.mutate import NUMBERS, a_value, spoil_text

KINDS = [*Kind.__members__, "OVERLAP_F_B", "X", ""]


def draw(random: Random) -> object:
    """An action, spoilt or not, or anything else."""
    if random.random() < 0.05:
        return a_value(random)
    one, other = (
        f"{random.choice(NUMBERS[:8])}{random.choice(KINDS)}{random.choice(['', *NUMBERS[:8]])}"
        for _ in range(2)
    )
    text = one if random.random() < 0.6 else f"({one};{other})OVERLAP_F_B"
    return spoil_text(random, text) if random.random() < 0.7 else text


def try_(input: object) -> None:
    """Read it; what can be read is written as it was."""
    action = parse(input)  # type: ignore[arg-type]
    assert str(action) == input
    assert parse(str(action)) == action
