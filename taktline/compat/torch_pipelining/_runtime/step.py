"""One step of a schedule: on Taktline's own runtime, or call by call on the stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from taktline.compat.torch_pipelining._runtime.ours import Ours, agreed_on_ours
from taktline.compat.torch_pipelining._stage.compute import Compute
from taktline.errors import StageUseError
from taktline.runtime.losses import warn_if_uneven
from taktline.runtime.microbatch import split_value

if TYPE_CHECKING:
    from taktline.compat.torch_pipelining._runtime.base import _PipelineSchedule

__all__ = ["Call", "run"]


@dataclass(frozen=True, slots=True)
class Call:
    """What a step was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    arg_mbs: list[Any] | None
    kwarg_mbs: list[Any] | None
    target_mbs: list[Any] | None
    losses: list[Any] | None
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None

    def microbatches(
        self, schedule: _PipelineSchedule
    ) -> tuple[list[Any], list[Any], list[Any] | None]:
        """Arguments, keyword arguments and targets of each micro-batch."""
        args, kwargs = schedule._split_inputs(self.args, self.kwargs)
        targets = self.target_mbs
        if targets is None and self.target is not None:
            targets = [*split_value(self.target, schedule._n_microbatches, name="target")]
        return (
            args if self.arg_mbs is None else self.arg_mbs,
            kwargs if self.kwarg_mbs is None else self.kwarg_mbs,
            targets,
        )


def run(schedule: _PipelineSchedule, call: Call) -> Any:
    """One step; gives the outputs where the last stage is."""
    trains = schedule._has_backward and getattr(schedule, "_backward_requires_autograd", True)
    if trains and not torch.is_grad_enabled():
        raise StageUseError(
            "step() requires gradients to be enabled for backward computation; it should not be "
            "used under torch.no_grad() context. Please call eval() instead."
        )
    stages = schedule._local_stages
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.chunks = schedule._n_microbatches
        stage.clear_runtime_states()
    if agreed_on_ours(schedule):
        return Ours.of(schedule).run(call)
    args, kwargs, targets = call.microbatches(schedule)
    if targets and schedule.scale_grads and not schedule._warned:
        schedule._warned = warn_if_uneven(0, targets)
    # Not passed where there are none: classes that were written for older torch do not take them.
    loss_kwargs = {} if call.loss_kwargs is None else {"loss_kwargs": call.loss_kwargs}
    with _reduced(schedule, stages):
        schedule._step_microbatches(
            args, kwargs, targets, call.losses, call.return_outputs, **loss_kwargs
        )
    for stage in stages:
        if stage.is_last and call.return_outputs:
            return schedule._merge_outputs(stage.output_chunks)
    return None


@contextmanager
def _reduced(schedule: _PipelineSchedule, stages: Sequence[Any]) -> Iterator[None]:
    """Inside, gradients begin anew; then they are reduced, scaled, and added to what was there.

    Otherwise, gradients that earlier steps have left would be scaled again.
    """
    scaled = schedule._has_backward and schedule.scale_grads
    earlier = [(p, p.grad) for p in _parameters(stages) if p.grad is not None] if scaled else []
    for parameter, _ in earlier:
        parameter.grad = None
    known = [stage for stage in stages if isinstance(stage, Compute)]
    factor = schedule._n_microbatches if schedule.scale_grads else 1
    try:
        yield
        for stage in known:
            if stage._due:
                # An order that says nothing of it.
                stage.perform_reduce_grad(factor)
    finally:
        for stage in known:
            stage.end_sync()
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def _parameters(stages: Sequence[Any]) -> Iterator[nn.Parameter]:
    for stage in stages:
        if isinstance(submod := getattr(stage, "submod", None), nn.Module):
            yield from submod.parameters()
