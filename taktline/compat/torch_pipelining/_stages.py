"""torch's stages, with corrected backwards and gradient reduction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from taktline.compat.torch_pipelining import _utils as utils
from taktline.compat.torch_pipelining import stage as torchs
from taktline.compat.torch_pipelining._earlier import Earlier
from taktline.compat.torch_pipelining._later import (
    KEEPS_STATES,
    Later,
    backward_from_edges,
)
from taktline.compat.torch_pipelining._metadata import HAS_META, Telling, is_whole, like
from taktline.compat.torch_pipelining._split_backward import Gradients
from taktline.errors import MismatchError, StageUseError
from taktline.stage import PipelineStage as OwnStage
from taktline.stage.grad_sync import GradSync

_BUFFER = "buffer" in signature(torchs._RecvInfo.__init__).parameters
"""Whether torch takes a buffer for each input in advance; since 2.15 a receive makes its own."""


class _RecvInfo(torchs._RecvInfo):
    """One input of one micro-batch; a buffer may be given in the place of its metadata."""

    @like(torchs._RecvInfo.__init__)
    def __init__(self, input_name: str, source: Any, *given: Any, **more: Any) -> None:
        buffer = given[0] if given else more.get("buffer")
        if HAS_META and len(given) < 2 and "tensor_meta" not in more:
            if isinstance(buffer, torch.Tensor):
                example = buffer.detach().requires_grad_()
                more["tensor_meta"] = utils.extract_tensor_meta(example)
            elif buffer is None:
                more["tensor_meta"] = None
        if not _BUFFER and ("tensor_meta" in more or len(given) > 1):
            given = given[1:]
            more.pop("buffer", None)
        super().__init__(input_name, source, *given, **more)


class _PipelineStageBase(Later):
    """A stage that is run by calls: one for each micro-batch's forward, backward and messages.

    Gradients are averaged over replicas at the end of a step, by Taktline
    (:mod:`taktline.stage.grad_sync`), and never by the wrapper itself.
    """

    examples: tuple[Any, Any] = (None, None)
    get_mesh: Any = None
    gradients_due = False
    """Whether gradients of this step wait to be reduced and scaled."""
    _runtime_validate = False  # before torch 2.12 there is no such switch
    _native: OwnStage | None = None
    _begun: GradSync | None = None
    _undetached = cached_property(lambda self: {})
    """Outputs of the last stage between I and W, by micro-batch."""

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
        self._native.around_forward = self.in_context if self._forward_contexts else None
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
        with nullcontext() if KEEPS_STATES else self.in_context(fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        place, there = self.stage_index_to_group_rank, self.stage_index + 1
        metas = self._stage_meta.outputs if HAS_META else getattr(self, "_outputs_meta", None)
        if metas is None or place.get(there, self.group_rank) == self.group_rank:
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
    ) -> tuple[Gradients, list[dict[str, Any]] | None]:
        """Run a backward ("full", "input" or "weight"); a wrapper does not communicate.

        ``last_backward`` changes nothing: replicas are averaged when all of a stage is done.
        """
        sync = self.grad_sync
        self.gradients_due = True
        if backward_type == "weight":
            groups = bwd_kwargs["param_groups"]
            found = torchs.stage_backward_weight(self.submod.parameters(), groups)
            if sync is not None:
                sync.weights_done()
            return found, None
        keys = ("stage_output", "output_grads", "input_values")
        outputs, gradients, inputs = (bwd_kwargs.get(key) for key in keys)
        if backward_type == "full":
            return backward_from_edges(torchs.stage_backward, outputs, gradients, inputs), None
        if backward_type == "input":
            return torchs.stage_backward_input(
                outputs or (), gradients, inputs or (), self.submod.parameters()
            )
        raise StageUseError(f"Unknown backward type: {backward_type}")

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward=False
    ):
        """B, or with ``full_backward=False`` its first half, I."""
        if self.has_backward and bwd_chunk_id in self.fwd_cache:
            outputs, inputs = self.fwd_cache[bwd_chunk_id]
            if self.is_last:
                # Torch detaches each of them; some may be no tensors, and W may need some.
                outputs = tuple(x for x in outputs if isinstance(x, torch.Tensor))
                if not full_backward and not self.is_first:
                    self._undetached[bwd_chunk_id], outputs = outputs, ()
                self.fwd_cache[bwd_chunk_id] = outputs, inputs
            if (meta := getattr(self, "_stage_meta", None)) is not None and meta.inputs is None:
                # A user's own stage may have no metadata.
                meta.inputs = utils.extract_tensor_metas(tuple(inputs), allow_none=True)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)  # pyright: ignore

    @like(torchs._PipelineStageBase.backward_weight_one_chunk)
    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """W, after which nothing needs the graph of the outputs."""
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        for output in self._undetached.pop(bwd_chunk_id, ()):
            if not output._is_view():
                output.detach_()

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
        for cache in (self.bwd_cache, self.backward_state, self.dw_runner, self._undetached):
            cache.clear()
        if not _BUFFER:
            # A step that has failed leaves some; its messages have ended.
            for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
                for info in infos:
                    info.buffer = None
        self.gradients_due = False


_TAKES = signature(torchs.PipelineStage.__init__)


class PipelineStage(_PipelineStageBase, Telling, Earlier):
    """One stage of a model, cut by hand; its arguments are those of the installed torch.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    >>> stage.forward_one_chunk(0, (torch.ones(2, 4),)).shape
    torch.Size([2, 4])
    >>> dist.destroy_process_group()
    """

    @like(torchs.PipelineStage.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        later = "pass_pipeline_metadata"
        if later not in _TAKES.parameters and kwargs.pop(later, False):
            raise StageUseError(
                f"{later}=True needs a version of torch whose stages take it; leave it out, or "
                "install a later torch"
            )
        super().__init__(*args, **kwargs)
        given = _TAKES.bind(self, *args, **kwargs).arguments
        self.examples = given.get("input_args"), given.get("output_args")
        self.get_mesh = given.get("get_mesh")


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
            waits = schedule._is_sharded(stage) and not schedule._finalize_gradients
            if stage.gradients_due and not waits:
                stage.perform_reduce_grad(schedule._grad_factor)
    finally:
        for stage in known:
            stage.end_sync()
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
