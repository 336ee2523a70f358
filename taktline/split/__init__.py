"""Models cut into stages."""

from __future__ import annotations

from taktline.split.markers import SplitPoint, pipe_split
from taktline.split.pipe import Pipe, PipeInfo, build_stage, pipeline

__all__ = ["Pipe", "PipeInfo", "SplitPoint", "build_stage", "pipe_split", "pipeline"]
