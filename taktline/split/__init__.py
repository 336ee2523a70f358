"""Models cut into stages: by hand, by the names of submodules, or at split points.

A model that is cut runs once, without data, and is recorded. In reading order:

- ``steps``: the steps of a forward, calls of submodules (*units*) and functions of torch between
  them; ``nested`` finds tensors in nested values;
- ``empty_model`` is the model without data, ``without_data`` runs its units, ``recorder`` notes the
  steps, to which ``patches`` leads, and ``record`` records twice and refuses what differs;
- ``cut`` decides which stage runs a step, and what crosses to the next one;
- ``program`` runs the steps of a stage, for one kind of ``arguments``, and ``recorded_stage`` is
  the module of a stage;
- ``by_names`` checks cuts and makes the stages, and ``auto`` finds cuts that have the same
  ``costs``; ``pipe`` finds split points, and has the names of torch.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
>>> by_hand([model[:2], model[2:]])
Pieces(2 stages: 20, 10 parameters)
"""

from taktline.split.auto import auto
from taktline.split.by_names import by_names
from taktline.split.on_meta import deferred, materialise
from taktline.split.pipe import Pipe, PipeInfo, SplitPoint, build_stage, pipe_split, pipeline
from taktline.split.stages import Pieces, by_hand

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
