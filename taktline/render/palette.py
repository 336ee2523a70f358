"""The colours of all drawings: one for each kind, lighter for a rank's later stages."""

from __future__ import annotations

from taktline.plan.action import Kind
from taktline.plan.plan import Placement

COLOURS = {
    Kind.F: "#3b75af",
    Kind.B: "#3f8746",
    Kind.I: "#23827c",
    Kind.W: "#e08a2c",
}
"""No two differ in red and green alone; letters in the boxes name the kinds, too."""

MEANINGS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for the inputs",
    Kind.W: "backward for the weights",
}

MEMORY = "#7d70ab"
"""The colour of memory curves."""


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of a kind for a rank's ``chunk``-th stage of ``chunks``: later ones are lighter.

    >>> shade(Kind.F, 0, 2), shade(Kind.F, 1, 2)
    ('#3b75af', '#93b3d3')
    """
    return lighter(COLOURS[kind], 0.45 * chunk / max(1, chunks - 1))


def lighter(colour: str, share: float) -> str:
    """A colour on its way to white, by a share of the way."""
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)


def shades(placement: Placement) -> dict[Kind, list[str]]:
    """The colour of each kind for every stage.

    >>> shades(Placement.v(2))[Kind.F]
    ['#3b75af', '#3b75af', '#93b3d3', '#93b3d3']
    """
    of_rank = [placement.stages_of(rank) for rank in range(placement.ranks)]
    chunks = [
        (of_rank[r].index(stage), len(of_rank[r])) for stage, r in enumerate(placement.rank_of)
    ]
    return {kind: [shade(kind, *chunk) for chunk in chunks] for kind in COLOURS}


def is_dark(colour: str) -> bool:
    """Whether white letters stand out on a colour: a contrast of 4 to 1, as WCAG counts it.

    >>> is_dark(COLOURS[Kind.F]), is_dark(COLOURS[Kind.W])
    (True, False)
    """
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 1.05 / (luminance + 0.05) >= 4
