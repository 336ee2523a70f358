"""Models cut into stages."""

from __future__ import annotations

from taktline.split.deferred import deferred
from taktline.split.markers import SplitPoint, pipe_split
from taktline.split.materialise import materialise
from taktline.split.pipe import Pipe, PipeInfo, build_stage, pipeline

__all__ = [
    "Pipe",
    "PipeInfo",
    "SplitPoint",
    "build_stage",
    "deferred",
    "materialise",
    "pipe_split",
    "pipeline",
]
