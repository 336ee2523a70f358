"""torch's stages, with correct backwards and gradient reduction."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge

from taktline.compat.torch_pipelining import _utils as utils
from taktline.compat.torch_pipelining import stage as torchs
from taktline.compat.torch_pipelining._metadata import (
    HAS_META,
    StageMetadata,
    is_whole,
    like,
    preparing,
)
from taktline.errors import MismatchError, StageUseError
from taktline.stage import PipelineStage as OwnStage
from taktline.stage.grad_sync import GradSync
from taktline.stage.split_backward import Splitter

KEEPS_STATES = hasattr(torchs, "_ForwardChunkState")
"""Whether stages drop outputs that were sent, as they do since torch 2.15."""


class _ForwardCache(MutableMapping[int, tuple[tuple[Any, ...], list[Any]]]):
    """Outputs and inputs of each micro-batch, as stages kept them before torch 2.15."""

    def __init__(self, stage: Any) -> None:
        self._stage, self._states = stage, stage._forward_chunk_states

    def __getitem__(self, chunk: int) -> tuple[tuple[Any, ...], list[Any]]:
        state = self._states[chunk]
        return state.stage_output_for_backward(), state.input_values

    def __setitem__(self, chunk: int, values: tuple[tuple[Any, ...], list[Any]]) -> None:
        self._states[chunk] = self._stage._make_forward_chunk_state(*values)

    def __delitem__(self, chunk: int) -> None:
        del self._states[chunk]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class _Edge(GradientEdge):
    """The root of a backward in the place of an output that was sent and dropped."""

    is_leaf = False
    grad_fn = property(lambda self: self.node)


class _PipelineStageBase(torchs._PipelineStageBase):
    """A stage that is run by calls: one for each micro-batch's forward, backward and messages.

    Gradients are averaged over replicas at the end of a step, by Taktline
    (:mod:`taktline.stage.grad_sync`), and never by the wrapper itself.
    """

    examples: tuple[Any, Any] = (None, None)
    get_mesh: Any = None
    gradients_due = False
    """Whether gradients of this step wait to be reduced and scaled."""
    is_reducing = False
    """Whether a reduction was started and not waited for."""
    _runtime_validate = False  # before torch 2.12 there is no such switch
    _native: OwnStage | None = None
    _begun: GradSync | None = None
    _splitter = cached_property(lambda self: Splitter(f"stage {self.stage_index}"))
    if KEEPS_STATES:
        fwd_cache = cached_property(lambda self: _ForwardCache(self))

    @property
    def expects_dtensors(self) -> bool:
        """Whether a user has announced DTensors: then gradients are placed as in torch.

        Taktline's own stages place a gradient as its activation.
        """
        given = getattr(self, "_user_meta", None)
        return self.get_mesh is not None or (given is not None and given.has_dtensors())

    @property
    def native(self) -> OwnStage:
        """The stage of Taktline with the same module."""
        if self._native is None:
            place = (self.stage_index, self.num_stages, self.device)
            ways = {"group": self.group, "get_mesh": self.get_mesh}
            self._native = OwnStage(self.submod, *place, *self.examples, **ways)
        self._native.submod, self._native.dw_builder = self.submod, self.dw_builder
        return self._native

    @property
    def grad_sync(self) -> GradSync | None:
        """Averages gradients over replicas, in place of the wrapper."""
        try:
            sync = self.native.grad_sync if is_whole(self) else None
        except MismatchError as error:
            raise StageUseError(f"{self.log_prefix} {error}") from error
        if sync is not self._begun:
            self.end_sync()
            if sync is not None and (reason := sync.refusal()):
                raise StageUseError(f"{self.log_prefix} {reason}")
            if sync is not None:
                sync.begin()
            self._begun = sync
        return sync

    def end_sync(self) -> None:
        """Let the wrapper communicate again."""
        if self._begun is not None:
            self._begun.end()
            self._begun = None

    def forward_maybe_with_nosync(self, *args, **kwargs):
        """Run the module; a wrapper around it does not communicate."""
        _ = self.grad_sync
        return self.submod(*args, **kwargs)

    @like(torchs._PipelineStageBase.forward_one_chunk)
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """F; raises if the next rank expects other tensors than the module has given."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        metas = self._stage_meta.outputs if HAS_META else None
        there = self.stage_index_to_group_rank.get(self.stage_index + 1, self.group_rank)
        if metas is None or there == self.group_rank:
            return output
        made, known = self.fwd_cache[fwd_chunk_id][0], [(x.dtype, [*x.shape]) for x in metas]
        local = [getattr(x, "_local_tensor", x) for x in made]
        if (found := [(x.dtype, [*x.shape]) for x in local]) != known:
            del self.fwd_cache[fwd_chunk_id]  # nothing of it is sent
            raise utils.PipeliningMetadataError(
                f"{self.log_prefix} micro-batch {fwd_chunk_id} returns {found}, but the next stage "
                f"expects {known}; use one size, the announced one, for all micro-batches"
            )
        return output

    def backward_maybe_with_nosync(
        self, backward_type, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run a backward ("full", "input" or "weight"); a wrapper does not communicate.

        ``last_backward`` changes nothing: replicas are averaged when all of a stage is done.
        """
        sync = self.grad_sync
        self.gradients_due = True
        if backward_type == "weight":
            for group in bwd_kwargs["param_groups"]:
                group["run"]()
            if sync is not None:
                sync.weights_done()
            return tuple(p.grad for p in self.submod.parameters()), None
        keys = ("stage_output", "output_grads", "input_values")
        outputs, gradients, inputs = (bwd_kwargs.get(key) for key in keys)
        if backward_type == "full":
            return torchs.stage_backward(outputs, gradients, inputs), None
        if backward_type == "input":
            return self._backward_input(outputs or (), gradients, inputs or ())
        raise StageUseError(f"Unknown backward type: {backward_type}")

    def _backward_input(
        self, outputs: Sequence[Any], output_grads: Sequence[Any] | None, values: Sequence[Any]
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]]]:
        """I, in the way of Taktline's own stages."""
        roots: list[Any] = []
        gradients: list[torch.Tensor] = []
        for output, gradient in zip(outputs, output_grads or [None] * len(outputs), strict=True):
            root: Any = _Edge(*output) if isinstance(output, GradientEdge) else output
            if isinstance(output, GradientEdge) or getattr(output, "requires_grad", False):
                roots.append(root)
                gradients.append(torch.ones_like(root) if gradient is None else gradient)
        inputs = [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]
        sync, pending = self._begun, None
        if roots:
            parameters = (
                [*self.submod.parameters()] if sync is None else sync.trainable(self.submod)
            )
            weights = [p for p in parameters if p.requires_grad]
            pending = self._splitter.run_input(roots, gradients, inputs, weights)
        found = tuple(x.grad if isinstance(x, torch.Tensor) and x.is_leaf else None for x in values)
        return found, [] if pending is None else [{"run": pending.run}]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward=False
    ):
        """B, or with ``full_backward=False`` its first half, I."""
        if self.has_backward and bwd_chunk_id in self.fwd_cache:
            outputs, inputs = self.fwd_cache[bwd_chunk_id]
            if self.is_last:
                # Torch detaches each of them; some may be no tensors.
                tensors = tuple(x for x in outputs if isinstance(x, torch.Tensor))
                self.fwd_cache[bwd_chunk_id] = tensors, inputs
            if (meta := getattr(self, "_stage_meta", None)) is not None and meta.inputs is None:
                # A user's own stage may have no metadata.
                meta.inputs = utils.extract_tensor_metas(tuple(inputs), allow_none=True)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)  # pyright: ignore

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients of the parameters."""
        self.gradients_due = False
        super().scale_grads(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int):
        """REDUCE_GRAD: average the gradients over replicas, and divide them."""
        sync = self.grad_sync
        if sync is not None:
            sync.reduce()
            self.end_sync()
        self.scale_grads(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Start to average the gradients of a sharded stage over replicas."""
        sync = self._sharded()
        if self.is_reducing:
            raise StageUseError(f"{self.log_prefix} A gradient reduction is already pending")
        self.is_reducing = True
        sync.reduce()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Wait for that, and divide the gradients."""
        sync = self._sharded()
        if not self.is_reducing:
            raise StageUseError(f"{self.log_prefix} No gradient reduction is pending")
        self.is_reducing = False
        sync.wait()
        self.end_sync()
        self.scale_grads(grad_scale_factor)

    def _sharded(self) -> GradSync:
        sync = self.grad_sync
        if sync is None or not sync.shards:
            raise StageUseError(
                f"{self.log_prefix} Asynchronous gradient reduction requires FSDP; call "
                "perform_reduce_grad"
            )
        return sync

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """First messages to the neighbours on other ranks; gloo has none to the same rank."""
        ops: list[dist.P2POp] = []
        for neighbour in (self.stage_index - 1, self.stage_index + 1):
            peer = self.stage_index_to_group_rank.get(neighbour, self.group_rank)
            if peer != self.group_rank:
                for op in (dist.irecv, dist.isend):
                    message = torch.zeros(1, device=self.device)
                    ops.append(dist.P2POp(op, message, group=self.group, group_peer=peer))
        return ops

    def clear_runtime_states(self) -> None:
        """Forget every micro-batch."""
        if self.is_reducing:
            self.wait_for_gradient_reduction(1)
        super().clear_runtime_states()
        for cache in (self.bwd_cache, self.backward_state, self.dw_runner):
            cache.clear()
        if KEEPS_STATES:
            # A step that has failed leaves some; its messages have ended.
            for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
                for info in infos:
                    info.buffer = None
        self.gradients_due = False


class PipelineStage(_PipelineStageBase, StageMetadata):
    """One stage of a model, cut by hand; its arguments are those of the installed torch.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    >>> stage.is_first, stage.is_last
    (True, True)
    >>> dist.destroy_process_group()
    """

    @like(torchs.PipelineStage.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = signature(torchs.PipelineStage.__init__).bind(self, *args, **kwargs).arguments
        self.examples = given.get("input_args"), given.get("output_args")
        self.get_mesh = given.get("get_mesh")

    # What follows are names of earlier versions of torch, which some programs still call.

    def _shape_inference(self, args: Any, kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """Run the module once, to find the metadata of its outputs."""
        with preparing([self]):
            if not HAS_META:
                return super()._shape_inference(args, kwargs)  # pyright: ignore
            self._forward_metadata_inference(args, kwargs)
        return self.get_outputs_meta()

    if HAS_META:

        def get_outputs_meta(self) -> tuple[Any, ...]:
            """Shapes and types of the outputs."""
            if self._stage_meta.outputs is None:
                raise utils.PipeliningMetadataError(
                    f"Stage {self.stage_index}: outputs metadata required for recv info."
                )
            return self._stage_meta.outputs

        def _configure_outputs_meta(self, outputs_meta: tuple[torch.Tensor, ...]) -> None:
            """Set the metadata of the outputs."""
            self._stage_meta.outputs = utils.extract_tensor_metas(outputs_meta)

        def _validate_fwd_input(self, args: tuple[Any, ...], kwargs: Any) -> None:
            """Raise unless a micro-batch's arguments are like those of the first one."""
            desc = f"Stage {self.stage_index} forward inputs"
            self._validate_stage_tensors(desc, self._stage_meta.inputs, tuple(args))

        def _validate_fwd_outputs(self, outputs: tuple[Any, ...]) -> None:
            """Raise unless a micro-batch's outputs are like those of the first one."""
            desc = f"Stage {self.stage_index} forward outputs"
            self._validate_stage_tensors(desc, self._stage_meta.outputs, outputs)

    def _create_act_recv_info(self) -> tuple[Any, ...]:
        """The source of each input."""
        self._setup_forward_recv_info(1, False)
        return self.args_recv_info[0]

    def _create_act_send_info(self) -> dict[int, list[int | None]]:
        """The stages that each output goes to."""
        self._setup_forward_send_info()
        return self.act_send_info


_TRACED = torchs._PipelineStage


class _PipelineStage(PipelineStage):
    """A stage that :func:`pipeline` has cut.

    It finds its metadata as a stage that was cut by hand does, since its module has no graph.
    """

    def __init__(
        self,
        stage_module: nn.Module,
        stage_index: int,
        pipe_info: Any,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(stage_module, stage_index, pipe_info.num_stages, device, group=group)
        _TRACED.__init__(self, stage_module, stage_index, pipe_info, device, group)

    def _move_submod_to_device(self) -> None:
        """Move the module to the device."""
        self.submod.to(self.device)

    get_stage_index_of_submod = _TRACED.get_stage_index_of_submod
    find_dst_rank = _TRACED.find_dst_rank


@contextmanager
def reduced(schedule: Any, stages: Sequence[Any]) -> Iterator[list[Any]]:
    """Set gradients aside; at the end, reduce and scale the new ones, and add the earlier ones.

    Otherwise, gradients of earlier steps would be scaled again. Yields the stages that are reduced
    at the end, if their order has no REDUCE_GRAD.
    """
    scaled = schedule._has_backward and schedule.scale_grads
    modules = [stage.submod for stage in stages if scaled and is_whole(stage)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    earlier = {p: p.grad for p in parameters if p.grad is not None}  # each once, if it is shared
    for parameter in earlier:
        parameter.grad = None
    known = [stage for stage in stages if isinstance(stage, _PipelineStageBase)]
    due = [*known]
    try:
        yield due
        for stage in due:
            if stage.gradients_due and not schedule._postpones(stage):
                stage.perform_reduce_grad(schedule._grad_factor)
    finally:
        for stage in known:
            stage.end_sync()
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
