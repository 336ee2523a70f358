"""Which files of the package a cut, a batch, a save and an error really pass: a traced run.

The walk of an error is from where a stage raises it to where the user gets it.

::

    python -m tests.walks        # how many, and which
"""

from __future__ import annotations

import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import taktline as tl

_HOUSE = Path(tl.__file__).parent


class Walk:
    """Notes the files of the package of which code runs, or which an error leaves."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def begin(self) -> None:
        """From now on, in all threads."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def end(self) -> list[str]:
        """The files so far."""
        sys.setprofile(None)
        threading.setprofile(None)
        found = [Path(name) for name in self._names]
        return sorted(str(f.relative_to(_HOUSE)) for f in found if f.is_relative_to(_HOUSE))

    def _note(self, frame: Any, event: str, _: object) -> None:
        if event in ("call", "return"):
            self._names.add(frame.f_code.co_filename)


class Fails(nn.Linear):
    """Raises if it is told to; the walk of an error begins there."""

    walk: Walk | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.walk is not None:
            self.walk.begin()
            raise RuntimeError("out of luck")
        return super().forward(input)


def walks() -> dict[str, list[str]]:
    """The files that each walk passes, once everything is imported and was used before."""
    model = nn.Sequential(*(Fails(4, 4) for _ in range(4)))
    x, found = torch.ones(8, 4), dict[str, list[str]]()

    def cut() -> tl.split.Pieces:
        return tl.split.by_names(model, ["2"], example=(x,))

    pipe = tl.Pipeline(
        list(cut()), microbatches=4, ranks=2, schedule="1f1b", loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD(pipe.parameters())

    def batch() -> None:
        pipe.step(x, target=x)

    def save() -> None:
        pipe.save(folder, optimizer=optimizer)

    with tempfile.TemporaryDirectory() as folder:
        for name, action in {"cut": cut, "batch": batch, "save": save}.items():
            for _ in range(3):
                walk = Walk()
                walk.begin()
                action()
                found[name] = walk.end()
                optimizer.step()
                optimizer.zero_grad()
    failing = next(m for m in pipe.stages[1].modules() if isinstance(m, Fails))
    for _ in range(2):
        failing.walk = walk = Walk()
        with suppress(tl.StageError):
            batch()
        found["error"], failing.walk = walk.end(), None
        batch()
    return found


if __name__ == "__main__":
    for walk, files in walks().items():
        print(f"{walk}: {len(files)}\n    {' '.join(files)}")
