"""Which files of the package a cut, a batch, a save and an error really pass: a traced run.

::

    python -m tests.walks        # how many, and which
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import taktline as tl

_HOUSE = Path(tl.__file__).parent


def passed(action: Callable[[], Any]) -> list[str]:
    """The files of the package of which code runs during a call, in all threads."""
    names: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    found = [Path(name) for name in names]
    return sorted(str(f.relative_to(_HOUSE)) for f in found if f.is_relative_to(_HOUSE))


def walks() -> dict[str, list[str]]:
    """The files that each walk passes, once everything is imported and was used before."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
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

    def error() -> None:
        with suppress(tl.StageError):
            pipe.step(x[:, :3], target=x)

    with tempfile.TemporaryDirectory() as folder:
        for name, action in {"cut": cut, "batch": batch, "save": save, "error": error}.items():
            for _ in range(3):
                found[name] = passed(action)
                optimizer.step()
                optimizer.zero_grad()
    return found


if __name__ == "__main__":
    for walk, files in walks().items():
        print(f"{walk}: {len(files)}\n    {' '.join(files)}")
