"""One stage of a model: its module, its micro-batches in flight, its backward whole or split."""

from __future__ import annotations

from taktline.stage.compiled import compile_stages
from taktline.stage.split_report import SplitReport, check_split_backward
from taktline.stage.stage import PipelineStage
from taktline.stage.ties import Tie

__all__ = ["PipelineStage", "SplitReport", "Tie", "check_split_backward", "compile_stages"]
