"""The page of the documentation that tells what became of each architecture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.zoo.architecture import Architecture
from tests.zoo.trial import PLACES, Way

__all__ = ["PAGE", "Verdict", "shortened", "write"]

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """\
# Which models

<!-- Written by `python -m tests.zoo`. -->

Small models of {count} architectures, from their configurations with random weights, each trained a
step by 1F1B and ZB-V on 2 and 4 ranks, which are 2 to 8 stages, {where}. Losses,
gradients and buffers are compared with those of the plain model. {works} train so, {whole} of them
in every number of stages that was tried. No model was changed.

*By name* is `tl.Pipeline(model, example=…)`, which finds by itself where to cut. What it refuses is
[traced](split.md#traced), and cut at layers. What does not work raises an error, which is shown in
short.
"""


@dataclass(frozen=True)
class Verdict:
    """What became of an architecture."""

    architecture: Architecture
    way: Way | None
    stages: int = 0
    """The most that it was cut into."""
    story: str = ""
    """What keeps it from more."""

    @property
    def whole(self) -> bool:
        """Whether it trains everywhere."""
        return self.stages == max(place.stages for place in PLACES)


def write(verdicts: Sequence[Verdict], *, gloo: bool) -> str:
    """The page; ``gloo`` is whether they were trained over processes, too."""
    works = [verdict for verdict in verdicts if verdict.way is not None]
    whole = [verdict for verdict in works if verdict.whole]
    where = f"in one process{' and over gloo' if gloo else ''}"
    text = _HEAD.format(count=len(verdicts), works=len(works), whole=len(whole), where=where)
    for kind, group in groupby(verdicts, key=lambda verdict: verdict.architecture.kind):
        text += f"\n## {kind}\n\n| model | | stages | why not, or not more |\n|---|---|---|---|\n"
        for verdict in group:
            most = f"up to {verdict.stages}" if verdict.way else ""
            told = verdict.story.replace("|", "\\|")
            text += f"| {verdict.architecture.name} | {verdict.way or 'no'} | {most} | {told} |\n"
    return text


def shortened(text: str, length: int = 160) -> str:
    """The beginning of an error, on one line.

    >>> shortened("StageError: rank 0, stage 0, micro-batch 0 (0F0): it does not fit; try again")
    'it does not fit'
    """
    text = re.sub(r"^\w+: (rank \d+, stage \d+, micro-batch \d+ \(\w+\): )?(\w+Error: )?", "", text)
    text = " ".join(text.split(";")[0].split())
    return text if len(text) <= length else f"{text[: length - 2].rsplit(' ', 1)[0]} …"
