"""Models cut into stages: by hand, by the names of submodules, or at split points.

A model that is cut runs once, without data, and is recorded. In reading order: ``steps`` says what
a record consists of; ``without_data`` has the model without data, whose units ``recorder`` runs to
note the steps of a forward; ``python_state`` notices what the forward changes behind the arguments
of units; ``cut`` records twice, refuses what differs, and decides which stage runs a step, and what
crosses to the next one; ``recorded_stage`` is the module of a stage, and runs its steps;
``by_names`` checks cuts and makes the stages, and ``auto`` finds cuts that cost the same; ``pipe``
finds split points, and has the names of torch.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
>>> by_hand([model[:2], model[2:]])
Pieces(2 stages: 20, 10 parameters)
"""

from taktline.split.auto import auto
from taktline.split.by_names import Pieces, by_hand, by_names
from taktline.split.on_meta import deferred, materialise
from taktline.split.pipe import Pipe, PipeInfo, SplitPoint, build_stage, pipe_split, pipeline

__all__ = [
    "Pieces",
    "Pipe",
    "PipeInfo",
    "SplitPoint",
    "auto",
    "build_stage",
    "by_hand",
    "by_names",
    "deferred",
    "materialise",
    "pipe_split",
    "pipeline",
]
