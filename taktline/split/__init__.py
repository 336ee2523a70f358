"""Models cut into stages."""

from __future__ import annotations

from taktline.split.by_names import by_names
from taktline.split.markers import SplitPoint, pipe_split
from taktline.split.pipe import Pipe, PipeInfo, build_stage, pipeline

__all__ = ["Pipe", "PipeInfo", "SplitPoint", "build_stage", "by_names", "pipe_split", "pipeline"]
