"""A stage of a module that somebody has cut out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from taktline.compat.torch_pipelining._stage.base import _PipelineStageBase
from taktline.compat.torch_pipelining._stage.infos import (
    _normalize_model_output_as_tuple,
    _RecvInfo,
)
from taktline.compat.torch_pipelining._stage.installed import as_installed
from taktline.compat.torch_pipelining._utils import (
    PipeliningMetadataError,
    _StageBackwardMeta,
    _StageForwardMeta,
    _StageMeta,
    _TensorMeta,
    extract_tensor_metas,
    validate_and_normalize_to_tuple,
    validate_tensors_metadata,
)
from taktline.meta import Signature, TensorMeta
from taktline.sharding import GetMesh
from taktline.transport.describe import decode, encode

__all__ = ["Inferring", "PipelineStage"]

Metas = tuple[_TensorMeta, ...]


class Inferring(_PipelineStageBase):
    """A stage that runs its module once to see what it gives, and tells the next one."""

    _user_meta: _StageMeta
    _votes_static: bool | None = None
    """Whether all stages of the pipeline know their shapes; None if nobody has asked them."""

    @property
    def knows_shapes(self) -> bool:
        """Whether it was told what comes in and goes out."""
        return self._user_meta.inputs is not None and self._user_meta.outputs is not None

    def _is_same_rank(self, other_stage: int) -> bool:
        ranks = self.stage_index_to_group_rank
        return ranks[other_stage] == ranks[self.stage_index]

    def _prepare_forward_infra(
        self,
        num_microbatches: int,
        args: tuple[Any, ...] | _StageForwardMeta | None,
        kwargs: dict[str, Any] | None = None,
        has_backward: bool = False,
    ) -> _StageForwardMeta | None:
        """Find out what comes in and goes out.

        Args:
            num_microbatches: how many micro-batches a step has.
            args: the arguments of the first one; for a later stage, what the one before on this
                rank has returned, or nothing if that lies on another rank.
            kwargs: its keyword arguments.
            has_backward: whether a backward follows.
        """
        if self.knows_shapes and self._votes_static is not False:
            self._stage_meta = _StageMeta(self._user_meta.inputs, self._user_meta.outputs)
        else:
            self._shape_inference(args, kwargs)
        self.chunks = num_microbatches
        self.args_recv_info = {m: self._create_act_recv_info() for m in range(num_microbatches)}
        self.act_send_info = self._create_act_send_info()
        self.grad_send_info = None
        return _StageForwardMeta(self.get_outputs_meta())

    def get_outputs_meta(self) -> Metas:
        """Shapes and types of the outputs."""
        outputs = self._stage_meta.outputs
        if outputs is None:
            raise PipeliningMetadataError(
                f"Stage {self.stage_index}: outputs metadata required for recv info."
            )
        return outputs  # pyright: ignore[reportReturnType]

    def _configure_outputs_meta(self, outputs_meta: tuple[torch.Tensor, ...]) -> None:
        """Say what goes out."""
        self._stage_meta.outputs = extract_tensor_metas(outputs_meta)  # pyright: ignore

    def _shape_inference(
        self, args: tuple[Any, ...] | _StageForwardMeta | None, kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, ...]:
        """Run the module once on values of the right shape; gives its outputs, without graph."""
        if self.is_first:
            if args is None or isinstance(args, _StageForwardMeta):
                raise PipeliningMetadataError(
                    f"Stage {self.stage_index}: First stage requires real tensors, got "
                    f"{type(args).__name__}."
                )
            values: tuple[Any, ...] = tuple(args)
            inputs = _metas(values)
        else:
            inputs = self._incoming(args)
            values = tuple(self._example(meta) for meta in inputs)
        with _undisturbed(self.submod, self.device), torch.enable_grad():
            output = self.forward_maybe_with_nosync(*values, **(kwargs or {}))
        outputs = _normalize_model_output_as_tuple(output)
        self._stage_meta = _StageMeta(inputs, _metas(outputs))
        self._check_told()
        if not self.is_last and not self._is_same_rank(self.stage_index + 1):
            self._send_meta(self._stage_meta.outputs, self.stage_index + 1)
        return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in outputs)

    def _check_told(self) -> None:
        """Compare what was found with what the stage was told, whatever gradients there are."""
        for kind, told, found in (
            ("inputs", self._user_meta.inputs, self._stage_meta.inputs),
            ("outputs", self._user_meta.outputs, self._stage_meta.outputs),
        ):
            if told is not None and found is not None:
                alike = tuple(_plain(meta) for meta in told), tuple(_plain(m) for m in found)
                validate_tensors_metadata(f"Stage {self.stage_index} forward {kind}", *alike)

    def _incoming(self, args: tuple[Any, ...] | _StageForwardMeta | None) -> Metas:
        """What the stage before gives."""
        before = self.stage_index - 1
        if not self._is_same_rank(before):
            return self._recv_meta(before)
        if isinstance(args, _StageForwardMeta):
            return args.forward_metas  # pyright: ignore[reportReturnType]
        if args and all(isinstance(value, torch.Tensor) for value in args):
            return _metas(args)
        raise PipeliningMetadataError(
            f"Stage {self.stage_index}: Expected _StageForwardMeta from same-rank previous stage, "
            f"got {type(args).__name__}."
        )

    def _example(self, meta: _TensorMeta) -> torch.Tensor:
        empty = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
        return empty.requires_grad_(meta.requires_grad)

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Tell a stage on another rank what it will get."""
        leaves = tuple(TensorMeta(tuple(m.shape), m.dtype, m.requires_grad) for m in meta)
        text = torch.tensor(list(encode(Signature(leaves))), dtype=torch.uint8)
        peer = self._resolve_peer_global_rank(dst_stage)
        for part in (torch.tensor([len(text)]), text):
            dist.send(part.to(self.device), peer, self.group)

    def _recv_meta(self, src_stage: int) -> Metas:
        """What a stage on another rank will send."""
        peer = self._resolve_peer_global_rank(src_stage)
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        dist.recv(length, peer, self.group)
        text = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        dist.recv(text, peer, self.group)
        found = decode(bytes(text.tolist())).tensors
        return tuple(_meta_of(meta.shape, meta.dtype, meta.requires_grad) for meta in found)

    def _create_act_recv_info(self) -> tuple[_RecvInfo, ...]:
        """For each input, where it comes from."""
        inputs = self._stage_meta.inputs or ()
        if self.is_first:
            return tuple(
                _RecvInfo(f"root_input_{index}", None, None, is_root_arg=True)
                for index, _ in enumerate(inputs)
            )
        before = self.stage_index - 1
        name = f"recv_for_{self.stage_index}_from_{before}"
        return tuple(_RecvInfo(name, before, None, meta) for meta in inputs)

    def _create_act_send_info(self) -> dict[int, list[int | None]]:
        """For each output, the stages that it goes to."""
        after: list[int | None] = [] if self.is_last else [self.stage_index + 1]
        return {index: list(after) for index, _ in enumerate(self.get_outputs_meta())}

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        target: torch.Tensor | None = None,
        received_grad_meta: _StageBackwardMeta | None = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> _StageBackwardMeta | None:
        """Find out which gradients come in: one for each output that asks for one."""
        self._setup_backward_recv_info(num_microbatches)
        inputs: Any = self._stage_meta.inputs or ()
        return _StageBackwardMeta(tuple(meta if meta.requires_grad else None for meta in inputs))

    def _create_grad_recv_info(
        self, act_send_info: dict[int, list[int | None]]
    ) -> tuple[_RecvInfo, ...]:
        """For each output, where its gradient comes from; from nowhere if it asks for none."""
        infos: list[_RecvInfo] = []
        for index, meta in enumerate(() if self.is_last else self.get_outputs_meta()):
            after = act_send_info[index][0]
            name = f"recv_grad_for_{self.stage_index}_from_{after}"
            wanted = meta.requires_grad
            infos.append(_RecvInfo(name, after if wanted else None, None, meta if wanted else None))
        return tuple(infos)


class PipelineStage(Inferring):
    """One piece of a model, cut out by hand.

    Args:
        submodule: the piece; it lies on ``device`` already.
        stage_index: its number, from 0.
        num_stages: how many pieces the model has.
        device: where it computes.
        input_args: one micro-batch's arguments, as an example; found out if they are not given.
        output_args: the same for the output.
        output_grads: not needed: gradients have the shapes of the outputs.
        input_grads: not needed, likewise.
        group: the ranks of the pipeline; all ranks by default.
        dw_builder: makes the function that computes the weights' gradients of a micro-batch.
        get_mesh: finds this rank's mesh for a DTensor that arrives.

    >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    >>> stage.forward_one_chunk(0, (torch.ones(2, 4),)).shape
    torch.Size([2, 4])
    """

    @as_installed
    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        input_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: GetMesh | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        self.examples = (input_args, output_args)
        self.get_mesh = get_mesh
        self._user_meta = _StageMeta(_told(input_args), _told(output_args))


def _told(example: Any) -> Metas | None:
    """What somebody says of a boundary: wherever a gradient is possible, there is one."""
    values = validate_and_normalize_to_tuple(example)
    if values is None:
        return None
    found = [x for x in values if x is not None]
    return tuple(_meta_of(x.shape, x.dtype, x.dtype.is_floating_point) for x in found)


def _metas(values: tuple[Any, ...]) -> Metas:
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            raise PipeliningMetadataError(
                f"value {index} between stages is a {type(value).__name__}; only tensors can go "
                "from stage to stage here (schedules that nothing is derived from take any value)"
            )
    return tuple(_TensorMeta.from_tensor(value) for value in values)


def _meta_of(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> _TensorMeta:
    example = torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
    return _TensorMeta.from_tensor(example)


def _plain(meta: Any) -> _TensorMeta:
    """Without what a stage cannot be told: whether there is a gradient, and how it lies."""
    return _meta_of(meta.shape, meta.dtype, False)


@contextmanager
def _undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a module may draw random numbers and write to its buffers without a trace."""
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    device = torch.device(device)
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices=devices, device_type=kind):
        yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
