"""What stages of later versions of torch have, under every version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from taktline.compat.torch_pipelining import stage as torchs
from taktline.errors import StageUseError


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStageInfo:
    """Which forward of a stage runs.

    On Taktline's own stages, none finds out metadata: the first step does, on the way.
    """

    stage_index: int
    microbatch_index: int
    is_metadata_inference: bool = False


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


CHECKS_STRIDES = hasattr(torchs._PipelineStageBase, "_validate_fwd_outputs")
"""Whether stages refuse outputs with other strides than the first ones, as before torch 2.12."""
KEEPS_STATES = hasattr(torchs, "_ForwardChunkState")
"""Whether stages drop outputs that were sent, as they do since torch 2.15."""


class Later(torchs._PipelineStageBase):
    """Contexts around forwards, gradients reduced in two calls, and outputs dropped once sent."""

    grad_sync: Any
    end_sync: Any
    scale_grads: Any
    is_reducing = False
    """Whether a reduction was started and not waited for."""
    _before: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """Buffers of the module, and their values before it ran for its metadata."""
    _forward_contexts = cached_property(lambda self: OrderedDict())
    if KEEPS_STATES:
        fwd_cache = cached_property(lambda self: _ForwardCache(self))

    def register_forward_context(
        self, context_factory: Callable[[PipelineStageInfo], AbstractContextManager[None]]
    ) -> RemovableHandle:
        """Enter a context around each forward of this stage; there may be one at a time."""
        if self._forward_contexts:
            raise StageUseError(
                f"{self.log_prefix} A pipeline forward context is already registered; remove its "
                "handle before registering another"
            )
        handle = RemovableHandle(self._forward_contexts)
        self._forward_contexts[handle.id] = context_factory
        return handle

    @contextmanager
    def in_context(self, microbatch: int, *, infers: bool = False) -> Iterator[None]:
        """Inside of the registered context, if there is one."""
        for make in self._forward_contexts.values():
            done = False
            with make(
                PipelineStageInfo(
                    stage_index=self.stage_index,
                    microbatch_index=microbatch,
                    is_metadata_inference=infers,
                )
            ):
                yield
                done = True
            if not done:
                raise StageUseError(
                    f"{self.log_prefix} micro-batch {microbatch}: A pipeline forward context "
                    "suppressed an exception from the stage module; forward contexts must not "
                    "suppress exceptions"
                )
            return
        yield

    def _pre_metadata_inference_backup(self) -> None:
        """Keep the buffers of the module, which a run for its metadata may change."""
        self._before = [(buffer, buffer.detach().clone()) for buffer in self.submod.buffers()]

    def _post_metadata_inference_cleanup(self) -> None:
        """Restore them."""
        with torch.no_grad():
            for buffer, value in self._before:
                buffer.copy_(value)
        self._before = ()
        clean = getattr(super(), "_post_metadata_inference_cleanup", None)
        if clean is not None:  # since 2.12
            clean()

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module for its metadata, in its context."""
        find: Any = super()._forward_metadata_inference  # pyright: ignore
        if KEEPS_STATES:  # it enters the context itself
            return find(*args, **kwargs)
        with self.in_context(0, infers=True):
            return find(*args, **kwargs)

    if CHECKS_STRIDES:

        def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
            """The same under its earlier name."""
            with self.in_context(0, infers=True):
                return super()._shape_inference(*args, **kwargs)  # pyright: ignore

        def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
            """Compare arguments with those of the first micro-batch, if that is known."""
            if self.args_recv_info:
                super()._validate_fwd_input(args, kwargs or {})  # pyright: ignore

        def _validate_fwd_outputs(self, outputs: Any) -> None:
            """Nothing: a stage compares sizes and types after it, and strides do not cross."""

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

    def _sharded(self) -> Any:
        sync = self.grad_sync
        if sync is None or not sync.shards:
            raise StageUseError(
                f"{self.log_prefix} Asynchronous gradient reduction requires FSDP; call "
                "perform_reduce_grad"
            )
        return sync

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Drop outputs that were sent; the backward begins at their edges in the graph."""
        if KEEPS_STATES:
            super().release_fwd_send_outputs(fwd_chunk_id)
        elif fwd_chunk_id in self.fwd_cache and not self.is_last and self.dw_builder is None:
            outputs, inputs = self.fwd_cache[fwd_chunk_id]
            if not isinstance(self.submod, DistributedDataParallel):
                self.fwd_cache[fwd_chunk_id] = tuple(map(_edge_of, outputs)), inputs


def _edge_of(output: Any) -> Any:
    """The edge of a plain tensor in the graph; another value as it is."""
    plain = type(output) is torch.Tensor and output.requires_grad
    return get_gradient_edge(output) if plain else output


def backward_from_edges(run: Any, outputs: Any, gradients: Any, inputs: Any) -> Any:
    """A full backward, also from edges of outputs that were dropped."""
    several = outputs if isinstance(outputs, (tuple, list)) else ()
    if KEEPS_STATES or not any(isinstance(output, GradientEdge) for output in several):
        return run(outputs, gradients, inputs)
    pairs = zip(several, gradients, strict=True)
    kinds = (GradientEdge, torch.Tensor)
    roots = [(o, g) for o, g in pairs if isinstance(o, kinds) and getattr(o, "requires_grad", True)]
    torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
    found = [value.grad if isinstance(value, torch.Tensor) else None for value in inputs]
    for value, gradient in zip(inputs, found, strict=True):
        if gradient is not None:
            value.grad = None
    return tuple(found)
