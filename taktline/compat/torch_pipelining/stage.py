"""Stages under the names that torch gives them."""

from taktline.split import build_stage
from taktline.stage import PipelineStage

__all__ = ["PipelineStage", "build_stage"]
