"""Before a step that goes call by call: stages find out what crosses their boundaries."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taktline.compat.torch_pipelining._runtime.base import _PipelineSchedule

__all__ = ["initialise"]


def initialise(
    schedule: _PipelineSchedule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target: Any,
    loss_kwargs: dict[str, Any] | None,
    forward_done: bool,
    backward_done: bool,
) -> tuple[bool, bool]:
    """Prepare the stages of this rank for a forward and, if one follows, for a backward.

    Each tells the next one what it gives: by return value on the same rank, else by a message.
    Gives what has been done by now.
    """
    stages = sorted(schedule._local_stages, key=lambda stage: stage.stage_index)
    count, trains = schedule._n_microbatches, schedule._has_backward
    if not forward_done:
        given: Any = None
        for stage in stages:
            prepare = stage._prepare_forward_infra
            known = args if stage.is_first else given
            given = _call(prepare, count, known, kwargs, has_backward=trains)
    if trains and not backward_done:
        found: Any = None
        for stage in reversed(stages):
            found = _call(
                stage._prepare_backward_infra,
                count,
                loss_fn=schedule._loss_fn,
                target=target,
                received_grad_meta=found,
                loss_kwargs=loss_kwargs,
            )
    return True, backward_done or trains


def _call(prepare: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Without the options that a stage, written for an older torch, does not take."""
    taken = signature(prepare).parameters
    if all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in taken.values()):
        options = {name: value for name, value in options.items() if name in taken}
    return prepare(*args, **options)
