"""A stage of a traced model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from taktline.compat.torch_pipelining._stage.manual import Inferring
from taktline.compat.torch_pipelining._utils import (
    PipeInfo,
    PipeliningMetadataError,
    _StageMeta,
)
from taktline.split.traced.module import StageModule

__all__ = ["_PipelineStage", "build_stage"]


class _PipelineStage(Inferring):
    """A piece that :func:`pipeline` has cut out.

    Args:
        stage_module: the piece.
        stage_index: its number, from 0.
        pipe_info: what is known of the whole.
        device: where it computes.
        group: the ranks of the pipeline; all ranks by default.
    """

    def __init__(
        self,
        stage_module: nn.Module,
        stage_index: int,
        pipe_info: PipeInfo,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(stage_module, stage_index, pipe_info.num_stages, device, group)
        self.pipe_info = pipe_info
        self._user_meta = _StageMeta()
        self.submod_nodes: list[fx.Node] = [
            node for node in pipe_info.graph.nodes if node.op == "call_module"
        ]
        if len(self.submod_nodes) != self.num_stages:
            raise PipeliningMetadataError(
                f"Number of submodules in pipe graph {len(self.submod_nodes)} does not match "
                f"number of stages {self.num_stages}"
            )
        self.node = self.submod_nodes[stage_index]
        self.name = str(self.node.name)
        self.submod_to_stage_index = {
            str(node.name): index for index, node in enumerate(self.submod_nodes)
        }
        self._move_submod_to_device()

    def _move_submod_to_device(self) -> None:
        """Bring the piece, and what its graph makes, to the device."""
        if isinstance(self.submod, StageModule):
            self.submod.set_device(torch.device(self.device))
        self.submod.to(self.device)

    def get_stage_index_of_submod(self, submod_name: str) -> int:
        """The number of a piece, by its name."""
        if submod_name not in self.submod_to_stage_index:
            raise PipeliningMetadataError(f"Stage id of {submod_name} not found")
        return self.submod_to_stage_index[submod_name]

    def find_dst_rank(self, user: Any) -> int | None:
        """The stage that uses a value; None if no stage does."""
        return None if user.op == "output" else self.get_stage_index_of_submod(user.name)


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> _PipelineStage:
    """A stage to run in a schedule, of a piece that :func:`pipeline` has cut out."""
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)
