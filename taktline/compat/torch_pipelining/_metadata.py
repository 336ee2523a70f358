"""The metadata of values at a stage's boundaries: how a stage finds and sends it."""

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
from taktline.stage.names import unchanged

like: Any = wraps
"""Gives a method the signature of torch's."""

_NOTHING = SimpleNamespace(inputs=None, outputs=None)

HAS_META = hasattr(torchs.PipelineStage, "_send_meta")
"""Whether stages send each other metadata, which they do since torch 2.12."""


def is_whole(stage: Any) -> bool:
    """Whether a stage has a module to run; a mock may have none."""
    return isinstance(getattr(stage, "submod", None), nn.Module)


class StageMetadata(torchs.PipelineStage):
    """A stage that tells its neighbours if it fails to find its metadata, since torch 2.12."""

    examples: tuple[Any, Any]
    unprepared: Exception | None = None
    """The error, if it has failed."""
    _has_sent = False
    """Whether the next stage got a message."""

    @like(torchs.PipelineStage._prepare_forward_infra)
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        given: Any = getattr(self, "_user_meta", _NOTHING)
        metas = (*(given.inputs or ()), *(given.outputs or ()))
        if metas and not any(meta.requires_grad for meta in metas):
            # Examples without gradients: assume one wherever it is possible.
            given.inputs, given.outputs = map(_with_gradients, (given.inputs, given.outputs))
        return self._find_out(super()._prepare_forward_infra, 1, args, kwargs)

    @like(torchs.PipelineStage._prepare_backward_infra)
    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        find = super()._prepare_backward_infra if self.unprepared is None else self._only_listen
        return self._find_out(find, -1, args, kwargs)

    def _find_out(self, find: Any, way: int, args: Any, kwargs: Any) -> Any:
        """Find the metadata of a boundary; if that fails, send the neighbour the failure instead.

        So all stages come to the end, where the error is raised.
        """
        if not HAS_META:
            return find(*args, **kwargs)
        self._has_sent = False
        try:
            return find(*args, **kwargs)
        except Exception as error:
            given = (*args, *kwargs.values())
            remote = next((value for value in given if isinstance(value, RemoteError)), error)
            self.unprepared = self.unprepared or remote
        if not self._has_sent and self._exchanges(self.stage_index + way):
            self._send_meta(RemoteError(), self.stage_index + way)
        return RemoteError()

    def _only_listen(self, *_: Any, **__: Any) -> None:
        """Receive the metadata of the next stage, and fail."""
        if self._exchanges(self.stage_index + 1):
            self._recv_meta(self.stage_index + 1)
        raise RemoteError

    def _exchanges(self, stage: int) -> bool:
        """Whether it exchanges metadata with a stage on another rank."""
        dynamic = self._inference_mode == utils.InferenceMode.DYNAMIC
        return dynamic and 0 <= stage < self.num_stages and not self._is_same_rank(stage)

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        self._has_sent = True
        super()._send_meta(meta, dst_stage)

    def _recv_meta(self, src_stage: int) -> Any:
        meta = super()._recv_meta(src_stage)
        if isinstance(meta, RemoteError):
            raise meta
        return meta

    def forget_metadata(self) -> None:
        """Find the metadata again, unless a user has announced it; since 2.12, any stage does."""
        if not HAS_META and self.examples[0] is None:
            self.inputs_meta = self._outputs_meta = None


class RemoteError(Exception):
    """Another stage could not find its metadata; sent in place of the metadata, too."""


def _with_gradients(metas: Any) -> Any:
    return metas and tuple(replace(m, requires_grad=m.dtype.is_floating_point) for m in metas)


def set_metadata(stage: Any, inputs: Sequence[Any] | None, outputs: Sequence[Any] | None) -> None:
    """Set the metadata of a stage that Taktline has run, as torch does."""
    if not HAS_META:  # there, a stage does not use it
        return
    meta = stage._stage_meta
    meta.inputs = utils.extract_tensor_metas(_metas(inputs))
    meta.outputs = utils.extract_tensor_metas(_metas(outputs))
    meta.input_grads = meta.inputs and utils._derive_grad_metas(meta.inputs)
    meta.output_grads = None if stage.is_last else utils._derive_grad_metas(meta.outputs or ())


def _metas(leaves: Sequence[Any] | None) -> tuple[torch.Tensor, ...] | None:
    """Meta tensors like these leaves; None if they lie on a mesh, or are unknown."""
    known = [TensorMeta.of(x) if isinstance(x, torch.Tensor) else x for x in tree_leaves(leaves)]
    tensors = [leaf for leaf in known if isinstance(leaf, TensorMeta)]
    if leaves is None or any(tensor.sharding is not None for tensor in tensors):
        return None
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        for x in tensors
    )


@contextmanager
def preparing(stages: Sequence[Any]) -> Iterator[None]:
    """Run modules to find the metadata of stages; an error of one of them is raised at the end."""
    own = [stage for stage in stages if is_whole(stage)]
    failed: list[Exception] = []
    with unchanged([stage.submod for stage in own]), ExitStack() as stack:
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
    # Errors that follow from it may have been raised, too.
    causes = [stage.unprepared for stage in own if isinstance(stage.unprepared, Exception)]
    for stage in own:
        stage.unprepared = None
    for error in sorted(causes or failed, key=lambda error: isinstance(error, RemoteError)):
        raise error
