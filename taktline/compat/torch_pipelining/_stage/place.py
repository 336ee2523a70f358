"""Where a stage stands, and what it keeps of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from taktline.compat.torch_pipelining._stage.infos import _RecvInfo
from taktline.errors import StageUseError

__all__ = ["Gradients", "Place"]

Gradients = tuple[torch.Tensor | None, ...]


class Place:
    """What the parts of a stage share."""

    submod: nn.Module
    stage_index: int
    num_stages: int
    device: torch.device
    group: dist.ProcessGroup | None
    stage_index_to_group_rank: dict[int, int]
    log_prefix: str
    chunks: int | None
    fwd_cache: dict[int, tuple[Any, list[Any]]]
    bwd_cache: dict[int, Gradients]
    output_chunks: list[Any]
    args_recv_info: dict[int, tuple[_RecvInfo, ...]]
    act_send_info: dict[int, list[int | None]]
    grad_recv_info: dict[int, tuple[_RecvInfo, ...]]
    grad_send_info: list[int | None] | None
    dw_builder: Callable[[], Callable[..., None]] | None
    dw_runner: dict[int, Callable[..., None]]
    backward_state: dict[int, tuple[Any, ...]]
    _runtime_validate: bool

    @property
    def has_backward(self) -> bool:
        """Whether the step that runs has a backward."""
        return getattr(self, "_has_backward", False)

    @has_backward.setter
    def has_backward(self, has_backward: bool) -> None:
        self._has_backward = has_backward

    @property
    def is_first(self) -> bool:
        """Whether it takes the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives the output and the loss."""
        return self.stage_index == self.num_stages - 1

    def _check_chunk_id(self, chunk_id: int) -> None:
        """Make sure that there is such a micro-batch."""
        if self.chunks is None:
            raise StageUseError("Attempted to access chunk_id before chunks have been configured.")
        if chunk_id >= self.chunks:
            raise StageUseError(f"Chunk id {chunk_id} is out of range [0, {self.chunks})")
