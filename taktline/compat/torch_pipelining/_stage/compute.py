"""What a stage computes for one micro-batch: its forward, and its backward whole or in halves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from taktline.compat.torch_pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from taktline.compat.torch_pipelining._debug import map_debug_info
from taktline.compat.torch_pipelining._stage.infos import _normalize_model_output_as_tuple
from taktline.compat.torch_pipelining._stage.place import Gradients, Place
from taktline.compat.torch_pipelining._utils import flatten_args
from taktline.errors import CallOrderError, StageUseError
from taktline.stage.grad_sync import GradSync, find

__all__ = ["Compute", "sync_of"]


class Compute(Place):
    """The part of a stage that runs its module."""

    _sync: GradSync | None = None
    _synced: nn.Module | None = None
    _sync_begun = False
    _due = False
    """Whether gradients of this step wait to be reduced and scaled."""

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]: ...
    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Gradients: ...
    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None: ...
    def _validate_fwd_outputs(self, outputs: tuple[Any, ...]) -> None: ...

    @property
    def grad_sync(self) -> GradSync | None:
        """What averages its gradients over replicas, told to do nothing by itself."""
        submod = getattr(self, "submod", None)
        if self._synced is not submod:
            self._sync = find(submod) if isinstance(submod, nn.Module) else None
            self._synced, self._sync_begun = submod, False
            if self._sync is not None and (story := self._sync.refusal()):
                raise StageUseError(f"{self.log_prefix} {story}")
        if self._sync is not None and not self._sync_begun:
            self._sync_begun = True
            self._sync.begin()
        return self._sync

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; a wrapper around it does not communicate."""
        _ = self.grad_sync
        return self.submod(*args, **kwargs)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """F: run a micro-batch, and keep what its backward needs.

        Args:
            fwd_chunk_id: the micro-batch.
            args: its arguments, for the first stage; the others have received theirs.
            kwargs: its keyword arguments, for any stage.
            save_forward_output: whether the last stage keeps its output.
        """
        values = args if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        keywords = kwargs or {}
        if self._runtime_validate:
            self._validate_fwd_input(values, keywords)
        try:
            output = self.forward_maybe_with_nosync(*values, **keywords)
        except Exception as error:
            raise StageUseError(
                f"\n            {self.log_prefix} failed to run forward:\n"
                f"            args: {map_debug_info(values)}\n"
                f"            kwargs: {map_debug_info(keywords)}\n"
                f"            {type(error).__name__}: {error}"
            ) from error
        outputs = _normalize_model_output_as_tuple(output)
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
        self.fwd_cache[fwd_chunk_id] = (outputs, [*flatten_args(values), *flatten_args(keywords)])
        if self._runtime_validate:
            self._validate_fwd_outputs(outputs)
        return output

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Gradients, list[dict[str, Any]] | None]:
        """Run a backward ("full", "input" or "weight"); a wrapper does not communicate.

        ``last_backward`` changes nothing: replicas are averaged when all of a stage is done.
        """
        _ = self.grad_sync
        self._due = True
        if backward_type == "full":
            return stage_backward(**bwd_kwargs), None
        if backward_type == "input":
            outputs = bwd_kwargs["stage_output"]
            roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            return stage_backward_input(
                roots,
                bwd_kwargs["output_grads"],
                bwd_kwargs["input_values"],
                self.submod.parameters(),
            )
        if backward_type == "weight":
            groups = bwd_kwargs["param_groups"]
            return stage_backward_weight(self.submod.parameters(), groups), None
        raise StageUseError(f"Unknown backward type: {backward_type}")

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """B, or with ``full_backward=False`` its first half, I.

        Args:
            bwd_chunk_id: the micro-batch.
            loss: what the last stage begins with.
            full_backward: whether the weights get their gradients, too.
            last_backward: whether it is the last of the stage in this step.
        """
        if not self.has_backward:
            return
        outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
        begin: dict[str, Any] = {"stage_output": outputs, "output_grads": None}
        if self.is_last:
            begin["stage_output"] = loss
        else:
            begin["output_grads"] = self._retrieve_recv_grads(bwd_chunk_id)
        begin["input_values"] = inputs
        gradients: Gradients = ()
        if self.dw_builder is not None or full_backward:
            gradients, _ = self.backward_maybe_with_nosync("full", begin, last_backward)
            if self.dw_builder is not None:
                later = self.dw_builder()
                if full_backward:
                    later()
                else:
                    self.dw_runner[bwd_chunk_id] = later
        else:
            groups = None
            if any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
                gradients, groups = self.backward_maybe_with_nosync("input", begin, last_backward)
            self.backward_state[bwd_chunk_id] = (begin, groups)
            self.dw_runner[bwd_chunk_id] = lambda: None
        self.bwd_cache[bwd_chunk_id] = gradients
        if self.is_last and not self.is_first:
            # A caller may keep the output; its graph would keep all activations.
            for output in outputs:
                if isinstance(output, torch.Tensor) and not output._is_view():
                    output.detach_()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """W: the second half."""
        if not self.has_backward:
            return
        if bwd_chunk_id not in self.dw_runner:
            raise CallOrderError(
                f"{self.log_prefix} Attempted to run backward_weight_one_chunk for chunk "
                f"{bwd_chunk_id} without first calling `backward_one_chunk(full_backward=False)`"
            )
        later = self.dw_runner.pop(bwd_chunk_id)
        if self.dw_builder is not None:
            later()
            return
        begin, groups = self.backward_state.pop(bwd_chunk_id)
        if groups is None:
            self.backward_maybe_with_nosync("full", begin, last_backward)
            return
        self.backward_maybe_with_nosync("weight", {"param_groups": groups}, last_backward)
        if self._sync is not None:
            self._sync.weights_done()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide what the parameters have in ``.grad``."""
        self._due = False
        if grad_scale_factor != 1:
            for parameter in self.submod.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """REDUCE_GRAD: average the gradients over replicas, and divide them."""
        sync = self.grad_sync
        if sync is not None:
            sync.reduce()
            self.end_sync()
        self.scale_grads(grad_scale_factor)

    def end_sync(self) -> None:
        """Give a wrapper its communication back, once what it does has ended."""
        if self._sync is not None and self._sync_begun:
            self._sync_begun = False
            self._sync.end()


def sync_of(stage: object) -> GradSync | None:
    """What averages the gradients of a stage; None also for what only looks like a stage."""
    return stage.grad_sync if isinstance(stage, Compute) else None
