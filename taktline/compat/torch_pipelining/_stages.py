"""torch's stages, with corrected backwards and gradient reduction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from taktline.compat.torch_pipelining import _utils as utils
from taktline.compat.torch_pipelining import stage as torchs
from taktline.compat.torch_pipelining._halves import (
    Gradients,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from taktline.compat.torch_pipelining._replaced import Watched
from taktline.errors import MismatchError, StageUseError
from taktline.split.traced.module import StageModule
from taktline.stage import PipelineStage as OwnStage
from taktline.stage.grad_sync import GradSync

__all__ = ["PipelineStage", "_PipelineStage", "_PipelineStageBase", "_RecvInfo"]


class _RecvInfo(torchs._RecvInfo):
    """One input of one micro-batch; what is known of it may be left out."""

    def __init__(
        self,
        input_name: str,
        source: int | None,
        buffer: torch.Tensor | None,
        tensor_meta: Any = ...,
        *,
        is_root_arg: bool = False,
    ) -> None:
        if tensor_meta is ...:
            look = getattr(utils, "extract_tensor_meta", lambda example: None)
            tensor_meta = None if buffer is None else look(buffer.detach().requires_grad_())
        super().__init__(input_name, source, buffer, tensor_meta, is_root_arg=is_root_arg)


class _PipelineStageBase(torchs._PipelineStageBase, metaclass=Watched):
    """A stage that is run by calls: one for each micro-batch's forward, backward and messages.

    Gradients are averaged over replicas when all of a step is done, by what Taktline has for each
    wrapper (:mod:`taktline.stage.grad_sync`), and never by the wrapper itself.
    """

    examples: tuple[Any, Any] = (None, None)
    get_mesh: Any = None
    gradients_due = False
    """Whether gradients of this step wait to be reduced and scaled."""
    unprepared: Exception | None = None
    """Why it could not find out what it returns."""
    _native: OwnStage | None = None
    _begun: GradSync | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it has a module to run; one that stands in for a stage may have none."""
        return isinstance(getattr(self, "submod", None), nn.Module)

    @property
    def expects_dtensors(self) -> bool:
        """Whether it was told of DTensors at its boundaries: their gradients are placed as torch's.

        Taktline's own stages send a gradient as its activation is placed.
        """
        told = getattr(self, "_user_meta", None)
        return self.get_mesh is not None or (told is not None and told.has_dtensors())

    @property
    def native(self) -> OwnStage:
        """The stage of Taktline that does the same."""
        if self._native is None:
            inputs, outputs = self.examples
            self._native = OwnStage(
                self.submod,
                self.stage_index,
                self.num_stages,
                self.device,
                inputs,
                outputs,
                group=self.group,
                get_mesh=self.get_mesh,
            )
        self._native.submod, self._native.dw_builder = self.submod, self.dw_builder
        return self._native

    @property
    def grad_sync(self) -> GradSync | None:
        """What averages its gradients over replicas, told to do nothing by itself."""
        try:
            sync = self.native.grad_sync if self.is_whole else None
        except MismatchError as error:
            raise StageUseError(f"{self.log_prefix} {error}") from error
        if sync is not self._begun:
            self.end_sync()
            if sync is not None and (story := sync.refusal()):
                raise StageUseError(f"{self.log_prefix} {story}")
            if sync is not None:
                sync.begin()
            self._begun = sync
        return sync

    def end_sync(self) -> None:
        """Give a wrapper its communication back, once what it does has ended."""
        if self._begun is not None:
            self._begun.end()
            self._begun = None

    def forward_maybe_with_nosync(self, *args, **kwargs):
        """Run the module; a wrapper around it does not communicate."""
        _ = self.grad_sync
        return self.submod(*args, **kwargs)

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
            found = stage_backward_weight(self.submod.parameters(), groups)
            if sync is not None:
                sync.weights_done()
            return found, None
        keys = ("stage_output", "output_grads", "input_values")
        outputs, gradients, inputs = (bwd_kwargs.get(key) for key in keys)
        if backward_type == "full":
            return stage_backward(outputs, gradients, inputs), None
        if backward_type == "input":
            return stage_backward_input(
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
                # Torch lets go of the graph of each; some may be no tensors.
                outputs = tuple(x for x in outputs if isinstance(x, torch.Tensor))
                self.fwd_cache[bwd_chunk_id] = outputs, inputs
            if (meta := getattr(self, "_stage_meta", None)) is not None and meta.inputs is None:
                # A stage that somebody has written need not tell.
                meta.inputs = utils.extract_tensor_metas(tuple(inputs), allow_none=True)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)  # pyright: ignore

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide what the parameters have in ``.grad``."""
        self.gradients_due = False
        super().scale_grads(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int):
        """REDUCE_GRAD: average the gradients over replicas, and divide them."""
        sync = self.grad_sync
        if sync is not None:
            sync.reduce()
            self.end_sync()
        self.scale_grads(grad_scale_factor)

    def clear_runtime_states(self) -> None:
        """Forget every micro-batch."""
        super().clear_runtime_states()
        for cache in (self.bwd_cache, self.backward_state, self.dw_runner):
            cache.clear()
        self.gradients_due = False


class _Older:
    """What stages had before torch 2.13, and some programs still call."""

    _stage_meta: Any
    stage_index: int

    def get_outputs_meta(self) -> tuple[Any, ...]:
        """Shapes and types of the outputs."""
        if self._stage_meta.outputs is None:
            raise utils.PipeliningMetadataError(
                f"Stage {self.stage_index}: outputs metadata required for recv info."
            )
        return self._stage_meta.outputs

    def _configure_outputs_meta(self, outputs_meta: tuple[torch.Tensor, ...]) -> None:
        """Say what goes out."""
        self._stage_meta.outputs = utils.extract_tensor_metas(outputs_meta)

    def _shape_inference(self, args: Any, kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """Run the module once, to see what it returns."""
        with undisturbed([self]):
            self._forward_metadata_inference(args, kwargs)  # pyright: ignore
        return self.get_outputs_meta()

    def _create_act_recv_info(self) -> tuple[Any, ...]:
        """For each input, where it comes from."""
        self._setup_forward_recv_info(1, False)  # pyright: ignore
        return self.args_recv_info[0]  # pyright: ignore

    def _create_act_send_info(self) -> dict[int, list[int | None]]:
        """For each output, the stages that it goes to."""
        self._setup_forward_send_info()  # pyright: ignore
        return self.act_send_info  # pyright: ignore

    def _validate_fwd_input(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Make sure that a micro-batch's arguments are as those of the first one were."""
        desc = f"Stage {self.stage_index} forward inputs"
        self._validate_stage_tensors(desc, self._stage_meta.inputs, tuple(args))  # pyright: ignore

    def _validate_fwd_outputs(self, outputs: tuple[Any, ...]) -> None:
        """Make sure that a micro-batch's outputs are as those of the first one were."""
        desc = f"Stage {self.stage_index} forward outputs"
        self._validate_stage_tensors(desc, self._stage_meta.outputs, outputs)  # pyright: ignore


_TAKES = signature(torchs.PipelineStage.__init__)
like: Any = wraps
"""Gives a method the signature of torch's."""


class PipelineStage(_PipelineStageBase, torchs.PipelineStage, _Older):
    """One stage of a model, cut by hand; its arguments are those of the installed torch.

    >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    >>> stage.forward_one_chunk(0, (torch.ones(2, 4),)).shape
    torch.Size([2, 4])
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

    @like(torchs.PipelineStage._prepare_forward_infra)
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        told: Any = getattr(self, "_user_meta", None)
        metas = () if told is None else (*(told.inputs or ()), *(told.outputs or ()))
        if told is not None and metas and not any(meta.requires_grad for meta in metas):
            # Examples that say nothing of gradients: wherever one is possible, there is one.
            told.inputs, told.outputs = _with_gradients(told.inputs), _with_gradients(told.outputs)
        find = super()._prepare_forward_infra
        return self._find_out(find, self.stage_index - 1, self.stage_index + 1, args, kwargs)

    @like(torchs.PipelineStage._prepare_backward_infra)
    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        find: Any = super()._prepare_backward_infra
        if self.unprepared is not None:
            after = self.stage_index + 1
            remote = after < self.num_stages and not self._is_same_rank(after)
            find = partial(self._recv_meta, after) if remote else _fail
            args, kwargs = (), {}
        return self._find_out(find, self.stage_index + 1, self.stage_index - 1, args, kwargs)

    def _find_out(self, find: Any, source: int, neighbour: int, args: Any, kwargs: Any) -> Any:
        """Find out what crosses a boundary; if that fails, the neighbour is told in its place.

        So all of them come to the end, where what went wrong is raised.
        """
        self._has_told = False
        values = (*args, *kwargs.values())
        near = 0 <= source < self.num_stages and self._is_same_rank(source)
        try:
            if near and any(isinstance(value, Unknown) for value in values):
                _fail()
            found = find(*map(_known, args), **{k: _known(v) for k, v in kwargs.items()})
            if self.unprepared is None:
                return found
        except Exception as error:
            self.unprepared = self.unprepared or error
        modes = getattr(utils, "InferenceMode", None)
        tells = modes is not None and self._inference_mode == modes.DYNAMIC and not self._has_told
        if tells and 0 <= neighbour < self.num_stages and not self._is_same_rank(neighbour):
            self._send_meta(Unknown(), neighbour)
        return Unknown()

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        self._has_told = True
        super()._send_meta(meta, dst_stage)

    def _recv_meta(self, src_stage: int) -> Any:
        meta = super()._recv_meta(src_stage)
        return _fail() if isinstance(meta, Unknown) else meta


class Unknown:
    """Stands for what a stage returns, where that could not be found out."""


class Elsewhere(Exception):
    """Another stage could not find out what it returns."""


def _known(value: Any) -> Any:
    return None if isinstance(value, Unknown) else value


def _fail() -> None:
    raise Elsewhere("another stage has failed")


def _with_gradients(metas: Sequence[Any] | None) -> tuple[Any, ...] | None:
    if metas is None:
        return None
    return tuple(replace(meta, requires_grad=meta.dtype.is_floating_point) for meta in metas)


class _PipelineStage(PipelineStage):
    """A stage that :func:`pipeline` has cut.

    It finds out what crosses its boundaries as a stage cut out by hand does: its module has a graph
    for each mode.
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
        self.pipe_info = pipe_info
        nodes = [node for node in pipe_info.graph.nodes if node.op == "call_module"]
        if len(nodes) != self.num_stages:
            raise utils.PipeliningMetadataError(
                f"Number of submodules in pipe graph {len(nodes)} does not match number of stages "
                f"{self.num_stages}"
            )
        self.node = nodes[stage_index]
        self.name = str(self.node.name)
        self.submod_to_stage_index = {str(node.name): i for i, node in enumerate(nodes)}
        self._move_submod_to_device()

    def _move_submod_to_device(self) -> None:
        """Move the module, and what its graph makes, to the device."""
        if isinstance(self.submod, StageModule):
            self.submod.set_device(torch.device(self.device))
        self.submod.to(self.device)

    get_stage_index_of_submod = torchs._PipelineStage.get_stage_index_of_submod
    find_dst_rank = torchs._PipelineStage.find_dst_rank


@contextmanager
def undisturbed(stages: Sequence[Any]) -> Iterator[None]:
    """Inside, modules may run to see what they return: buffers and gradients stay as they are.

    What went wrong in one of them is raised at the end.
    """
    own = [stage for stage in stages if isinstance(getattr(stage, "submod", None), nn.Module)]
    buffers = [(b, b.detach().clone()) for stage in own for b in stage.submod.buffers()]
    gradients = [(p, p.grad) for stage in own for p in stage.submod.parameters()]
    failed: list[Exception] = []
    with ExitStack() as stack:
        for stage in own:
            stage.unprepared = None
            sync = stage.native.grad_sync if isinstance(stage, _PipelineStageBase) else None
            if sync is not None and not sync.shards:
                sync.begin()
                stack.callback(sync.end)
        try:
            yield
        except Exception as error:
            failed.append(error)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    for parameter, gradient in gradients:
        parameter.grad = gradient
    # What follows from it may have been raised, too.
    causes = [stage.unprepared for stage in own if isinstance(stage.unprepared, Exception)]
    for stage in own:
        stage.unprepared = None
    for error in sorted(causes or failed, key=lambda error: isinstance(error, Elsewhere)):
        raise error
