"""Schedules with one stage on each rank."""

from __future__ import annotations

from typing import Any

import torch

from taktline.compat.torch_pipelining._runtime.base import (
    ArgsSpec,
    KwargsSpec,
    LossFn,
    MergeSpec,
    _PipelineSchedule,
)
from taktline.compat.torch_pipelining._runtime.initialise import initialise
from taktline.compat.torch_pipelining._runtime.orders import Order

__all__ = ["PipelineScheduleSingle"]


class PipelineScheduleSingle(_PipelineSchedule):
    """A schedule with one stage a rank; what runs when is left to who derives from it."""

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )
        self._stage = stage
        self._num_stages = stage.num_stages
        self._stage_forward_initialized = False
        self._stage_backward_initialized = False
        self.pipeline_order: Order | None = self._get_pipeline_order()

    def _initialize_stage(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        target: torch.Tensor | None = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Let the stage find out what crosses its boundaries, if it has not yet."""
        done = (self._stage_forward_initialized, self._stage_backward_initialized)
        done = initialise(self, args, kwargs, target, loss_kwargs, *done)
        self._stage_forward_initialized, self._stage_backward_initialized = done

    def _get_pipeline_order(self) -> Order | None:
        """What each rank computes; None if that is not written down."""
        return None
