"""What a stage sends to its neighbours and receives from them, as operations of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from taktline.compat.torch_pipelining._stage.infos import (
    _normalize_model_output_as_tuple,
    _RecvInfo,
)
from taktline.compat.torch_pipelining._stage.place import Gradients, Place
from taktline.compat.torch_pipelining._utils import (
    PipeliningMetadataError,
    _TensorMeta,
    to_local_if_dtensor,
)
from taktline.errors import CallOrderError

__all__ = ["Messages"]


class Messages(Place):
    """The part of a stage that knows its neighbours."""

    def _create_grad_send_info(self, args_recv_info: tuple[_RecvInfo, ...]) -> list[int | None]:
        """For each input, the stage that its gradient goes to."""
        return [
            info.source if isinstance(info, _RecvInfo) and not info.is_root_arg else None
            for info in args_recv_info
        ]

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        """The rank of a stage, as the default group counts."""
        rank = self.stage_index_to_group_rank[stage_idx]
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...]) -> list[dist.P2POp]:
        """The receives of what comes from other stages."""
        ops: list[dist.P2POp] = []
        for info in recv_infos:
            if not isinstance(info, _RecvInfo) or info.is_root_arg or info.source is None:
                continue
            room = info.room(self.device)
            if room is not None:
                peer = self._resolve_peer_global_rank(info.source)
                ops.append(dist.P2POp(dist.irecv, room, peer, self.group))
        return ops

    def _send(self, tensor: torch.Tensor, stage: int) -> dist.P2POp:
        # Contiguous: what comes in is.
        plain = to_local_if_dtensor(tensor, detach=True).contiguous()
        return dist.P2POp(dist.isend, plain, self._resolve_peer_global_rank(stage), self.group)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives that a forward waits for."""
        return self._get_recv_ops(self.args_recv_info[fwd_chunk_id])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives that a backward waits for."""
        if not self.has_backward or self.is_last:
            return []
        return self._get_recv_ops(self.grad_recv_info[bwd_chunk_id])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of what a forward has given."""
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        return [
            self._send(output, stage)
            for index, output in enumerate(outputs)
            for stage in self.act_send_info.get(index, [])
            if stage is not None and isinstance(output, torch.Tensor)
        ]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of what a backward has given for its inputs; a missing gradient is zero."""
        if not self.has_backward or self.is_first:
            return []
        infos = self.args_recv_info[bwd_chunk_id]
        if self.grad_send_info is None:
            self.grad_send_info = self._create_grad_send_info(infos)
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        ops: list[dist.P2POp] = []
        for info, gradient, stage in zip(infos, gradients, self.grad_send_info, strict=False):
            if stage is None:
                if gradient is not None:
                    raise PipeliningMetadataError(
                        f"[{self.stage_index}] for chunk {bwd_chunk_id} has gradient {gradient} "
                        "but no stage to send it to"
                    )
                continue
            meta = info.tensor_meta
            if isinstance(meta, _TensorMeta) and not meta.requires_grad:
                continue
            if gradient is None and isinstance(meta, _TensorMeta):
                gradient = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
            if gradient is not None:
                ops.append(self._send(gradient, stage))
        return ops

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take an input from the stage before, which lies on the same rank."""
        infos = self.args_recv_info[mb_index]
        outputs = _normalize_model_output_as_tuple(prev_stage_outputs)
        for info, tensor in zip(infos, outputs, strict=False):
            _check_local("set_local_fwd_input", info, tensor)
            info.buffer = tensor.detach()

    def get_local_bwd_output(self, mb_index: int) -> Gradients:
        """Give the gradients of the inputs to the stage before, which lies on the same rank."""
        if not self.has_backward:
            raise CallOrderError("can't steal_bwd_input if this stage doesn't have backward")
        if self.is_first:
            raise CallOrderError("can't get bwd output if this stage is first")
        self._check_chunk_id(mb_index)
        return self.bwd_cache.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Gradients, mb_index: int) -> None:
        """Take the gradients of the outputs from the stage after, which lies on the same rank."""
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise CallOrderError(f"Expected tuple, got {type(next_stage_bwd_outputs)}")
        if not self.has_backward:
            raise CallOrderError("can't set bwd input if this stage doesn't have backward")
        if self.is_last:
            raise CallOrderError("can't set bwd input if this stage is last")
        infos = self.grad_recv_info[mb_index]
        for info, tensor in zip(infos, next_stage_bwd_outputs, strict=False):
            if tensor is not None:
                _check_local("set_local_bwd_input", info, tensor)
                info.buffer = tensor

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        """The inputs that have arrived, each a tensor of its own."""
        found: list[torch.Tensor] = []
        for index, info in enumerate(self.args_recv_info[fwd_chunk_id]):
            if not isinstance(info, _RecvInfo) or info.is_root_arg:
                raise PipeliningMetadataError(
                    "_retrieve_recv_activations expected non-root _RecvInfo but got root arg at "
                    f"index {index}"
                )
            buffer = info.take()
            if buffer is None:
                raise PipeliningMetadataError(
                    f"Non-root arg '{info.input_name}' has None buffer or tensor_meta"
                )
            # Detached, so that nothing that was hung on an earlier input is on this one.
            found.append(buffer.detach().requires_grad_(self._wants_gradient(info, buffer)))
        return tuple(found)

    def _wants_gradient(self, info: _RecvInfo, buffer: torch.Tensor) -> bool:
        differentiable = buffer.is_floating_point() or buffer.is_complex()
        wanted = info.tensor_meta is None or info.tensor_meta.requires_grad
        return self.has_backward and differentiable and wanted and torch.is_grad_enabled()

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Gradients:
        """The gradients of the outputs that have arrived; None where none is due."""
        found: list[torch.Tensor | None] = []
        for index, info in enumerate(self.grad_recv_info[bwd_chunk_id]):
            if not isinstance(info, _RecvInfo):
                raise PipeliningMetadataError(f"Expected _RecvInfo but got {type(info)}")
            if info.is_root_arg:
                raise PipeliningMetadataError(
                    f"grad_recv_info should not contain root args, but found one at index {index}"
                )
            found.append(info.take())
        return tuple(found)

    def _map_tensor_from_recv_info(
        self, recv_infos: tuple[_RecvInfo, ...]
    ) -> Sequence[torch.Tensor | None]:
        """The buffers of inputs that come from other stages."""
        if any(info.is_root_arg for info in recv_infos):
            raise PipeliningMetadataError("Cannot get recv tensor from root arg")
        return tuple(info.buffer for info in recv_infos)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """One small message to and from each neighbour on another rank, to open connections."""
        ops: list[dist.P2POp] = []
        here = self.stage_index_to_group_rank[self.stage_index]
        for stage, send_first in ((self.stage_index + 1, True), (self.stage_index - 1, False)):
            if not 0 <= stage < self.num_stages or self.stage_index_to_group_rank[stage] == here:
                continue
            peer = self._resolve_peer_global_rank(stage)
            room, value = torch.zeros(1, device=self.device), torch.ones(1, device=self.device)
            pair = [
                dist.P2POp(dist.isend, value, peer, self.group),
                dist.P2POp(dist.irecv, room, peer, self.group),
            ]
            ops += pair if send_first else pair[::-1]
        return ops


def _check_local(method: str, info: _RecvInfo, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise CallOrderError(
            f"expected tensor values as outputs from prev stage, got {type(tensor)}"
        )
    if not isinstance(info, _RecvInfo) or info.is_root_arg:
        raise CallOrderError(
            f"{method} should only be called on non-first stage, which should always have non-root "
            "RecvInfo"
        )
