"""What crosses the boundaries of a stage: how it finds that out, and tells its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from taktline.compat.torch_pipelining import _utils as utils
from taktline.compat.torch_pipelining import stage as torchs
from taktline.meta import TensorMeta
from taktline.pytree import tree_leaves

__all__ = ["TELLS", "Elsewhere", "Older", "Telling", "is_whole", "like", "show", "undisturbed"]

like: Any = wraps
"""Gives a method the signature of torch's."""

_NOTHING = SimpleNamespace(inputs=None, outputs=None)

TELLS = hasattr(torchs.PipelineStage, "_send_meta")
"""Whether stages tell each other what they return; before torch 2.12 they have no method for it."""


def is_whole(stage: Any) -> bool:
    """Whether a stage has a module to run; one that stands in for a stage may have none."""
    return isinstance(getattr(stage, "submod", None), nn.Module)


class Telling(torchs.PipelineStage):
    """A stage that tells its neighbours, too, if it cannot find out what it returns."""

    unprepared: Exception | None = None
    """Why it could not."""

    @like(torchs.PipelineStage._prepare_forward_infra)
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        told: Any = getattr(self, "_user_meta", _NOTHING)
        metas = (*(told.inputs or ()), *(told.outputs or ()))
        if metas and not any(meta.requires_grad for meta in metas):
            # Examples that say nothing of gradients: wherever one is possible, there is one.
            told.inputs, told.outputs = map(_with_gradients, (told.inputs, told.outputs))
        return self._find_out(super()._prepare_forward_infra, 1, args, kwargs)

    @like(torchs.PipelineStage._prepare_backward_infra)
    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        find = super()._prepare_backward_infra if self.unprepared is None else self._only_listen
        return self._find_out(find, -1, args, kwargs)

    def _find_out(self, find: Any, way: int, args: Any, kwargs: Any) -> Any:
        """Find out what crosses a boundary; if that fails, the neighbour is told in its place.

        So all of them come to the end, where what went wrong is raised.
        """
        if not TELLS:
            return find(*args, **kwargs)
        self._has_told = False
        try:
            return find(*args, **kwargs)
        except Exception as error:
            told = [value for value in (*args, *kwargs.values()) if isinstance(value, Elsewhere)]
            self.unprepared = self.unprepared or (told or [error])[0]
        neighbour = self.stage_index + way
        if not self._has_told and self._listens(neighbour):
            self._send_meta(Elsewhere(), neighbour)
        return Elsewhere()

    def _only_listen(self, *_: Any, **__: Any) -> None:
        """Take what the next stage tells, and fail."""
        if self._listens(self.stage_index + 1):
            self._recv_meta(self.stage_index + 1)
        raise Elsewhere

    def _listens(self, stage: int) -> bool:
        """Whether there is such a stage, and messages are how it is told."""
        there = 0 <= stage < self.num_stages and not self._is_same_rank(stage)
        return there and self._inference_mode == utils.InferenceMode.DYNAMIC

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        self._has_told = True
        super()._send_meta(meta, dst_stage)

    def _recv_meta(self, src_stage: int) -> Any:
        meta = super()._recv_meta(src_stage)
        if isinstance(meta, Elsewhere):
            raise meta
        return meta


class Elsewhere(Exception):
    """Another stage could not find out what it returns; stands for that, too."""


def _with_gradients(metas: Any) -> Any:
    return metas and tuple(replace(m, requires_grad=m.dtype.is_floating_point) for m in metas)


class Older:
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


def show(stage: Any, inputs: Sequence[Any] | None, outputs: Sequence[Any] | None) -> None:
    """Have a stage that Taktline has run say what crosses its boundaries, as torch's do."""
    if not TELLS:  # there, what a stage knows is not found out again
        return
    meta = stage._stage_meta
    meta.inputs = utils.extract_tensor_metas(_metas(inputs))
    meta.outputs = utils.extract_tensor_metas(_metas(outputs))
    meta.input_grads = meta.inputs and utils._derive_grad_metas(meta.inputs)
    meta.output_grads = None if stage.is_last else utils._derive_grad_metas(meta.outputs or ())


def _metas(leaves: Sequence[Any] | None) -> tuple[torch.Tensor, ...] | None:
    """Tensors without data that are like these; None if they lie on a mesh, or nobody knows."""
    known = [TensorMeta.of(x) if isinstance(x, torch.Tensor) else x for x in tree_leaves(leaves)]
    tensors = [leaf for leaf in known if isinstance(leaf, TensorMeta)]
    if leaves is None or any(tensor.sharding is not None for tensor in tensors):
        return None
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        for x in tensors
    )


@contextmanager
def undisturbed(stages: Sequence[Any]) -> Iterator[None]:
    """Inside, modules may run to see what they return: buffers and gradients stay as they are.

    What went wrong in one of them is raised at the end.
    """
    own = [stage for stage in stages if is_whole(stage)]
    buffers = [(b, b.detach().clone()) for stage in own for b in stage.submod.buffers()]
    gradients = [(p, p.grad) for stage in own for p in stage.submod.parameters()]
    failed: list[Exception] = []
    with ExitStack() as stack:
        for stage in own:
            stage.unprepared = None
            native = getattr(stage, "native", None)
            sync = None if native is None else native.grad_sync
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
