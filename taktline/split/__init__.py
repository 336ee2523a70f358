"""Models cut into stages: by hand, by the names of submodules, or traced with torch.export.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
>>> by_hand([model[:2], model[2:]])
Pieces(2 stages: 20, 10 parameters)
"""

from taktline.split.auto import auto
from taktline.split.by_names import by_names
from taktline.split.on_meta import deferred, materialise
from taktline.split.stages import Pieces, by_hand
from taktline.split.traced.pipe import Pipe, PipeInfo, build_stage, pipeline
from taktline.split.traced.trace import SplitPoint, pipe_split

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
