"""Checkpoints: a model and its training, saved in parts and loaded into any layout.

:meth:`taktline.Pipeline.save` and :meth:`taktline.Pipeline.load` are what most people use.

>>> import tempfile, torch
>>> import taktline as tl
>>> pipe = tl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, ranks=2)
>>> saved = pipe.save(tempfile.mkdtemp(), torch.optim.AdamW(pipe.parameters()))
>>> tl.checkpoint.latest(saved.parent) == saved
True
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from taktline.checkpoint.loading import Loaded
from taktline.checkpoint.loading import load as _load
from taktline.checkpoint.model_state import ModelState
from taktline.checkpoint.saving import Training, latest
from taktline.checkpoint.saving import save as _save
from taktline.checks import check
from taktline.runtime.schedule import Schedule

__all__ = ["Loaded", "latest", "load", "load_into", "save"]


def save(
    folder: str | os.PathLike[str],
    schedule: Schedule,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    extra: Any = None,
    keep: int | None = None,
    async_save: bool = False,
) -> Path:
    """Save the stages of a schedule on every rank, as :meth:`taktline.Pipeline.save` does.

    >>> import tempfile
    >>> import taktline as tl
    >>> stages = [tl.PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")]
    >>> save(tempfile.mkdtemp(), tl.ScheduleGPipe(stages[0], 1)).name
    '000001-step-0'
    """
    model = ModelState.of_schedule(check("schedule", schedule, Schedule))
    training = Training(optimizer, scheduler, scaler, data, extra)
    return _save(model, folder, training, keep=keep, async_save=async_save)


def load(
    folder: str | os.PathLike[str],
    schedule: Schedule,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
) -> Loaded:
    """Load into the stages of a schedule, as :meth:`taktline.Pipeline.load` does.

    >>> import tempfile
    >>> import taktline as tl
    >>> schedule = tl.ScheduleGPipe(tl.PipelineStage(nn.Linear(2, 2), 0, 1, "cpu"), 1)
    >>> load(save(tempfile.mkdtemp(), schedule, extra={"epoch": 3}), schedule).extra
    {'epoch': 3}
    """
    model = ModelState.of_schedule(check("schedule", schedule, Schedule))
    return _load(model, folder, Training(optimizer, scheduler, scaler, data))


def load_into(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
) -> Loaded:
    """Load into a whole model without a pipeline, as :meth:`taktline.Pipeline.load` does.

    It may have been saved from any pipeline. Its parameters may be DTensors.

    >>> import tempfile, torch
    >>> import taktline as tl
    >>> stages = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> saved = tl.Pipeline(stages, cuts=["1"], microbatches=2, ranks=2).save(tempfile.mkdtemp())
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> load_into(model, folder=saved).step, torch.equal(model[1].weight, stages[1].weight)
    (0, True)
    """
    check("model", model, nn.Module, "an nn.Module")
    training = Training(optimizer, scheduler, scaler, data)
    return _load(ModelState.of_model(model), folder, training)
