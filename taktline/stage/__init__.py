"""One stage of a model: its module and the micro-batches that are in flight in it."""

from __future__ import annotations

from taktline.stage.stage import PipelineStage

__all__ = ["PipelineStage"]
