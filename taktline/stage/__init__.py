"""One stage of a model: its module, its micro-batches in flight, its backward whole or split."""

from __future__ import annotations

from taktline.stage.compiled import compile_stages
from taktline.stage.names import Tie
from taktline.stage.stage import PipelineStage

__all__ = ["PipelineStage", "Tie", "compile_stages"]
