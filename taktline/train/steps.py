"""Runs a step or an evaluation on the ranks of this process; the loss that a model returns."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from traceback import walk_tb
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import ref

import torch
from torch import nn

from taktline import pytree
from taktline.checks import require_one_of
from taktline.errors import BatchError, ScheduleError, StageError
from taktline.plan import Kind, Plan
from taktline.runtime.schedule import Schedule
from taktline.split.arguments import without_cache
from taktline.stage.names import unwrapped
from taktline.train.build import Built
from taktline.train.loader import broadcast_output
from taktline.transport.exit_hooks import notes

T = TypeVar("T")

_OPTIONS = frozenset(inspect.signature(Schedule.step).parameters)
"""Keywords of a step that are not passed to the model."""

Outputs: TypeAlias = bool | Literal["last"]
"""Whether to return outputs: on every rank, on none, or on that of the last stage."""

Lists: TypeAlias = tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]
"""Lists to fill: the losses of micro-batches, and the losses that were added."""


def run(
    built: Built,
    verb: Literal["step", "eval"],
    batch: tuple[tuple[Any, ...], Any, dict[str, Any]],
    lists: Lists,
    return_outputs: Outputs,
) -> tuple[Any, torch.Tensor | None]:
    """Run a step or an eval; returns its output, and its loss, which is the same on all ranks."""
    require_one_of("return_outputs", return_outputs, (True, False, "last"), BatchError)
    args, target, options = _on_device(batch, built.ranks.device)
    if built.plan.stages == 1:
        options = _without_cache(built, options)
    try:
        output = getattr(built.schedule, verb)(
            *args,
            target=target,
            losses=lists[0],
            aux_losses=lists[1],
            share_losses=True,
            return_outputs=bool(return_outputs),
            **options,
        )
    except StageError as error:
        for text in built.batch_dims.misfits(args, of_model(options)):
            error.add_note(text)
        raise
    ranks, loss = built.ranks, built.schedule.loss
    if return_outputs is True:
        output = broadcast_output(output, ranks, built.plan.placement.rank_of[-1])
    if loss is not None and ranks.replicas > 1:
        loss = ranks.mean_of_replicas(loss)
    _latest[:] = [] if loss is None else [ref(loss)]
    return output, loss


_latest: list[ref[torch.Tensor]] = []
"""The loss of the latest step."""


def _explain_backward(error: BaseException) -> None:
    """Add a note to the error of ``loss.backward()`` after a step, if it ends the program."""
    called = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    if any(each is not None and each is loss() for each in called for loss in _latest):
        error.add_note(
            "pipe.step() has run the backward: gradients are in .grad. Leave out loss.backward()"
        )


notes.append(_explain_backward)


def require_backward(plan: Plan) -> None:
    """Raise unless a plan can train."""
    if not plan.has(Kind.B, Kind.I):
        raise ScheduleError(f"{plan.name} has no backward; call eval(…)")


def of_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a step that are passed to the model."""
    return {name: value for name, value in options.items() if name not in _OPTIONS}


def _without_cache(built: Built, options: dict[str, Any]) -> dict[str, Any]:
    """The options for a model in one stage, which keeps no cache, as in several stages.

    Most models of transformers return one by default, and those of micro-batches cannot be joined.
    """
    if options.get("kwarg_mbs") is not None or built.options["kwargs_chunk_spec"] is not None:
        return options  # the user has said what each keyword argument is
    model = unwrapped(built.schedule._stages[0].submod)
    return without_cache(_argument_names(type(model)), options)


@lru_cache(maxsize=16)
def _argument_names(model: type[nn.Module]) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def _on_device(values: T, device: torch.device) -> T:
    """The values, with CPU tensors moved to the device."""
    if device.type == "cpu":
        return values

    def move(tensor: torch.Tensor) -> torch.Tensor:
        on_cpu = tensor.device.type == "cpu"
        return tensor.to(device, non_blocking=True) if on_cpu else tensor

    return pytree.tree_map_only(torch.Tensor, move, values)


@contextmanager
def in_mode(*modules: nn.Module, training: bool) -> Iterator[None]:
    """Put modules into training or evaluation; at the end each part is as before."""
    before = {part: part.training for module in modules for part in module.modules()}
    try:
        for module in modules:
            module.train(training)
        yield
    finally:
        for part, mode in before.items():
            part.training = mode
