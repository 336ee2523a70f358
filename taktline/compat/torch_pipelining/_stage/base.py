"""What every stage has: its place, its caches, its messages, its computations."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from taktline.compat.torch_pipelining._stage.compute import Compute
from taktline.compat.torch_pipelining._stage.infos import _RecvInfo
from taktline.compat.torch_pipelining._stage.messages import Messages
from taktline.compat.torch_pipelining._utils import (
    PipeliningMetadataError,
    _StageBackwardMeta,
    _StageForwardMeta,
    _StageMeta,
    validate_tensors_metadata,
)
from taktline.errors import MismatchError, StageUseError
from taktline.transport import local

__all__ = ["_PipelineStageBase"]


class _PipelineStageBase(Messages, Compute, ABC):
    """A stage that is run by calls: one for each micro-batch's forward, backward and messages.

    Args:
        submodule: the piece of the model.
        stage_index: its number, from 0.
        num_stages: how many there are.
        device: where it computes.
        group: the ranks of the pipeline; all ranks by default.
        dw_builder: makes the function that computes the weights' gradients of a micro-batch.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        if stage_index >= num_stages:
            raise MismatchError(f"Stage index {stage_index} is out of range of {num_stages}")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = device
        self.group = group
        self.dw_builder = dw_builder
        self.group_rank, self.group_size = _place(group)
        if self.group_size > num_stages:
            raise StageUseError(
                f"Pipeline group size {self.group_size} cannot be larger than number of stages "
                f"{num_stages}"
            )
        self.backward_state = {}
        self.dw_runner = {}
        self.fwd_cache = {}
        self.bwd_cache = {}
        self.output_chunks = []
        self._has_backward = False
        self.log_prefix = f"[Stage {stage_index}]"
        self.args_recv_info = {}
        self.act_send_info = {}
        self.grad_recv_info = {}
        self.grad_send_info = None
        self.chunks = None
        self.stage_index_to_group_rank = {
            stage: stage % self.group_size for stage in range(num_stages)
        }
        self._runtime_validate = get_debug_level() is DebugLevel.DETAIL
        self._stage_meta = _StageMeta()

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: tuple[Any, ...] | _StageForwardMeta | None,
        kwargs: dict[str, Any] | None = None,
        has_backward: bool = False,
    ) -> _StageForwardMeta | None:
        """Find out what comes in and goes out; ``args`` are those of the first micro-batch."""
        raise self._missing("_prepare_forward_infra")

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: torch.Tensor | None = None,
        received_grad_meta: _StageBackwardMeta | None = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> _StageBackwardMeta | None:
        """Find out which gradients come in."""
        raise self._missing("_prepare_backward_infra")

    def _create_grad_recv_info(
        self, act_send_info: dict[int, list[int | None]]
    ) -> tuple[_RecvInfo, ...]:
        """For each output, where its gradient comes from."""
        raise self._missing("_create_grad_recv_info")

    def _missing(self, method: str) -> StageUseError:
        return StageUseError(f"{type(self).__name__} has no {method}; a stage that runs needs one")

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        """Note for each micro-batch where its gradients come from."""
        self.chunks = num_microbatches
        for microbatch in range(num_microbatches):
            self.grad_recv_info[microbatch] = self._create_grad_recv_info(self.act_send_info)
        self.grad_send_info = None

    def _validate_stage_tensors(
        self, desc: str, expected: tuple[Any, ...] | None, actual: tuple[Any, ...]
    ) -> None:
        """Make sure that tensors are as they were found to be."""
        if expected is None:
            raise PipeliningMetadataError(f"{desc}: no metadata available")
        validate_tensors_metadata(desc, expected, actual)

    def _validate_fwd_input(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Make sure that a micro-batch's arguments are as those of the first one were."""
        desc = f"Stage {self.stage_index} forward inputs"
        self._validate_stage_tensors(desc, self._stage_meta.inputs, tuple(args))

    def _validate_fwd_outputs(self, outputs: tuple[Any, ...]) -> None:
        """Make sure that a micro-batch's outputs are as those of the first one were."""
        desc = f"Stage {self.stage_index} forward outputs"
        self._validate_stage_tensors(desc, self._stage_meta.outputs, outputs)

    def clear_runtime_states(self) -> None:
        """Forget every micro-batch."""
        for cache in (self.fwd_cache, self.bwd_cache, self.backward_state, self.dw_runner):
            cache.clear()
        self.output_chunks.clear()
        for infos in self.args_recv_info.values():
            for info in infos:
                if isinstance(info, _RecvInfo) and info.buffer is not None:
                    info.buffer.grad = None


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The rank of this process in a group, and the size of that."""
    here = local.current()
    if here is not None:
        return here.rank, here.size
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
