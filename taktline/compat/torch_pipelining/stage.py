"""Stages under the names that torch gives them."""

from taktline.compat.torch_pipelining._stage.base import _PipelineStageBase
from taktline.compat.torch_pipelining._stage.infos import (
    _normalize_model_output_as_tuple,
    _RecvInfo,
    _RootArgPlaceholder,
)
from taktline.compat.torch_pipelining._stage.manual import PipelineStage
from taktline.compat.torch_pipelining._stage.traced import _PipelineStage, build_stage
from taktline.compat.torch_pipelining._utils import _make_tensor_from_meta

__all__ = [
    "PipelineStage",
    "_PipelineStage",
    "_PipelineStageBase",
    "_RecvInfo",
    "_RootArgPlaceholder",
    "_make_tensor_from_meta",
    "_normalize_model_output_as_tuple",
    "build_stage",
]
