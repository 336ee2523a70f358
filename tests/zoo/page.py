"""The page of the documentation that reports what became of each architecture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.zoo.architecture import Architecture

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """\
# Which models

<!-- Written by `python -m tests.zoo`. -->

Small models of {count} architectures, from their configurations with random weights, each trained a
step by 1F1B and ZB-V on 2 and 4 ranks, which are 2, 4 and 8 stages. Losses, gradients and buffers
are those of the plain model, to the last bit where numbers are added in the same order: not if
several stages use a weight or a value, or if what crosses between processes is transposed. No model
was changed.

| ranks | train | in every number of stages |
|---|---|---|
| in one process | {local} | {local_whole} |
| in processes, over gloo | {gloo} | {gloo_whole} |

*By name* is `tl.Pipeline(model, example=…)`, which finds by itself where to cut. The numbers are
the most stages that a model was trained in, – where it was not run. What does not work raises an
error, which is shown in short.
"""
_COLUMNS = (
    "| model | | in one process | over gloo | why not, or not more |\n|---|---|---|---|---|\n"
)
_MOST = 8


@dataclass(frozen=True)
class Result:
    """What became of an architecture."""

    way: str = "no"
    """How it was cut."""
    local: int | None = None
    """The most stages that it trains in, in one process; None if it was not run so."""
    gloo: int | None = None
    """The same over processes."""
    reason: str = ""
    """What keeps it from more."""


def write(architectures: Iterable[Architecture], results: Mapping[str, Result]) -> str:
    """The page of all architectures; ``results`` are by their names."""
    listed = list(architectures)
    counts = {
        "count": len(listed),
        **_counted("local", [result.local for result in results.values()]),
        **_counted("gloo", [result.gloo for result in results.values()]),
    }
    text = _HEAD.format(**counts)
    for kind, group in groupby(listed, key=lambda architecture: architecture.kind):
        text += f"\n## {kind}\n\n{_COLUMNS}"
        for architecture in group:
            result = results.get(architecture.name, Result())
            most = " | ".join("–" if n is None else str(n) for n in (result.local, result.gloo))
            reason = result.reason.replace("|", "\\|")
            text += f"| {architecture.name} | {result.way} | {most} | {reason} |\n"
    return text


def _counted(where: str, most: Sequence[int | None]) -> dict[str, str]:
    tried = [each for each in most if each is not None]
    return {
        where: f"{sum(each > 0 for each in tried)} of {len(tried)}",
        f"{where}_whole": str(sum(each == _MOST for each in tried)),
    }


def read(text: str) -> dict[str, Result]:
    """The results that a page lists, by the names of the architectures.

    >>> read("| BERT | by name | 8 | – |  |")
    {'BERT': Result(way='by name', local=8, gloo=None, reason='')}
    """
    results: dict[str, Result] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)][1:-1]
        if len(cells) == 5 and re.fullmatch(r"–|\d+", cells[2]):
            name, way, *most, reason = cells
            local, gloo = (None if cell == "–" else int(cell) for cell in most)
            results[name] = Result(way, local, gloo, reason.replace("\\|", "|"))
    return results


def shortened(text: str, length: int = 160) -> str:
    """The beginning of an error, on one line.

    >>> shortened("StageError: rank 0, stage 0, micro-batch 0 (0F0): it does not fit; try again")
    'it does not fit'
    """
    text = re.sub(r"^\w+: (rank \d+, stage \d+, micro-batch \d+ \(\w+\): )?(\w+Error: )?", "", text)
    text = " ".join(text.split(";")[0].split())
    return text if len(text) <= length else f"{text[: length - 2].rsplit(' ', 1)[0]} …"
