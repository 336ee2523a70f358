"""What every schedule has: its micro-batches, its loss function, and a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from taktline.compat.torch_pipelining._runtime.ours import Ours
from taktline.compat.torch_pipelining._runtime.step import Call, run
from taktline.compat.torch_pipelining._stage.compute import sync_of
from taktline.compat.torch_pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from taktline.errors import BatchError, BatchTypeError, StageUseError

__all__ = ["_PipelineSchedule"]

LossFn = Callable[..., torch.Tensor]
ArgsSpec = tuple[TensorChunkSpec, ...]
KwargsSpec = dict[str, TensorChunkSpec]
MergeSpec = dict[str, Any] | tuple[Any]


class _PipelineSchedule(ABC):
    """What is common to all schedules.

    Args:
        n_microbatches: into how many pieces a batch is cut.
        loss_fn: takes an output and a target; without it, a step is forward only.
        args_chunk_spec: along which dimension each argument is cut; dimension 0 by default.
        kwargs_chunk_spec: the same for keyword arguments.
        output_merge_spec: how outputs are merged; along dimension 0 by default.
        scale_grads: whether gradients are those of the mean of the micro-batches' losses.
    """

    _plan_name: str | None = None
    """The plan of Taktline that says the same; None if there is none."""
    dynamic_shapes: bool = False
    """Set it where what stages give depends on values, not on shapes alone."""
    _ours: Ours | None = None
    """What runs it, if Taktline's own runtime does."""
    _on_ours: bool | None = None
    """Whether that does; None until a first step."""
    _warned: bool = False
    """Whether it was said that micro-batches differ in size."""

    def __init__(
        self,
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: ArgsSpec | None = None,
        kwargs_chunk_spec: KwargsSpec | None = None,
        output_merge_spec: MergeSpec | None = None,
        scale_grads: bool = True,
    ) -> None:
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self.scale_grads = scale_grads
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self._has_backward = loss_fn is not None
        self._internal_losses: list[Any] = []
        self.backward_counter: Counter[int] = Counter()
        self.fwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        self.bwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        self.unshard_ops: defaultdict[int, list[Any]] = defaultdict(list)
        self.unsharded_stages: set[int] = set()

    @property
    def _local_stages(self) -> Sequence[Any]:
        """The stages of this rank."""
        several = getattr(self, "_stages", None)
        return [self._stage] if several is None else several  # pyright: ignore[reportAttributeAccessIssue]

    def _keeps_its_order(self) -> bool:
        """Whether what runs when is as the schedule was made."""
        return True

    def _maybe_compute_loss(
        self,
        stage: Any,
        output: Any,
        target_mbs: Sequence[Any] | None,
        mb_index: int,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Note the loss of a micro-batch, if this is the last stage and there is one."""
        if not stage.is_last or self._loss_fn is None:
            return
        if target_mbs is None:
            if self._has_backward:
                raise BatchError(
                    f"stage {stage.stage_index}, micro-batch {mb_index}: loss_fn needs a target; "
                    "pass target=… to step() on the rank of the last stage"
                )
            return
        known = self._internal_losses
        known += [None] * (mb_index + 1 - len(known))
        known[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        """The loss of a micro-batch; None if this is not the last stage, or there is none."""
        known = self._internal_losses
        if stage.is_last and self._has_backward and 0 <= mb_index < len(known):
            return known[mb_index]
        if known and not 0 <= mb_index < len(known):
            raise StageUseError(
                f"Loss for microbatch {mb_index} is not available. Available losses for "
                f"microbatches: {known}"
            )
        return None

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Fill the caller's list, and forget the losses."""
        several = stages if isinstance(stages, list) else [stages]
        if losses is not None and any(stage.is_last for stage in several):
            if len(self._internal_losses) != self._n_microbatches:
                raise StageUseError(
                    f"Expecting {self._n_microbatches} losses but got {len(self._internal_losses)}"
                )
            losses[:] = self._internal_losses
        self._internal_losses.clear()

    def _compute_loss(
        self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The loss of a micro-batch."""
        assert self._loss_fn is not None  # who asks has looked
        return self._loss_fn(output, target, **(loss_kwargs or {}))

    @abstractmethod
    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run the micro-batches of a step on this rank, stage call by stage call."""

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward and, if there is a ``loss_fn``, backward.

        Args:
            args: the model's arguments; used on the rank of the first stage.
            target: what ``loss_fn`` compares the output with; used where the last stage is.
            losses: a list to be filled with the loss of each micro-batch, there.
            return_outputs: whether to keep and give the outputs; costs their memory.
            loss_kwargs: further arguments for ``loss_fn``.
            arg_mbs: instead of ``args``: the arguments of each micro-batch, cut already.
            kwarg_mbs: instead of ``kwargs``, likewise.
            target_mbs: instead of ``target``, likewise.
            kwargs: keyword arguments for the stages of this rank.
        """
        batch = (args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        return run(self, Call(*batch, losses, return_outputs, loss_kwargs))

    def eval(
        self, *args: Any, target: Any = None, losses: list[Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run a batch forward only, without gradients; with a target, the losses too."""
        before = self._has_backward
        self._has_backward = False
        try:
            with torch.no_grad():
                return self.step(*args, target=target, losses=losses, **kwargs)
        finally:
            self._has_backward = before

    def _assert_unsharded(self, stage: Any) -> None:
        """Gather the parameters of a sharded stage, if nothing has."""
        sync = sync_of(stage)
        if sync is not None and sync.shards and stage.stage_index not in self.unsharded_stages:
            sync.unshard()
            self.unsharded_stages.add(stage.stage_index)

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Make sure that there is one of each for each micro-batch; gives the arguments."""
        given = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        for name, chunks in given.items():
            if chunks is None:
                continue
            if not isinstance(chunks, list):
                raise BatchTypeError(f"{name} must be a list but got a {type(chunks)}")
            if len(chunks) != self._n_microbatches:
                raise BatchError(f"Expecting {self._n_microbatches} {name} but got {len(chunks)}")
        if losses is not None and not isinstance(losses, list):
            raise BatchTypeError(f"losses must be a list but got a {type(losses)}")
        count = self._n_microbatches
        return (
            [()] * count if arg_mbs is None else arg_mbs,
            [{}] * count if kwarg_mbs is None else kwarg_mbs,
        )

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """The arguments of each micro-batch."""
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        return split_args_kwargs_into_chunks(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """One output of those of the micro-batches."""
        return merge_chunks(output_chunks, self._output_merge_spec)
