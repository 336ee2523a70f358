"""One look for all drawings: a colour for each kind, lighter for a rank's later stages."""

from __future__ import annotations

from taktline.plan.action import Kind

__all__ = ["COLOURS", "MEANINGS", "shade"]

COLOURS = {
    Kind.F: "#3b75af",
    Kind.B: "#4f9d55",
    Kind.I: "#2f9e97",
    Kind.W: "#e08a2c",
}
"""Told apart without red against green; the letters in the boxes say the same without colour."""

MEANINGS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for the inputs",
    Kind.W: "backward for the weights",
}


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of a kind for a rank's ``chunk``-th stage of ``chunks``: later ones are lighter.

    >>> shade(Kind.F, 0, 2), shade(Kind.F, 1, 2)
    ('#3b75af', '#94b4d3')
    """
    towards_white = 0.45 * chunk / max(1, chunks - 1)
    channels = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * towards_white):02x}" for c in channels)
