"""Runs a step or an evaluation on the ranks of this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn

from taktline import pytree
from taktline.checks import require_instance, require_one_of
from taktline.errors import BatchError, StageError
from taktline.runtime.schedule import Schedule
from taktline.split.traced.trace import in_mode
from taktline.train.build import Built
from taktline.train.outputs import shared_output

__all__ = ["OPTIONS", "Outputs", "evaluating", "run"]

T = TypeVar("T")

OPTIONS = frozenset(inspect.signature(Schedule.step).parameters)
"""Keywords of a step that are not passed to the model."""

Outputs: TypeAlias = bool | Literal["last"]
"""Whether to return outputs: on every rank, on none, or on that of the last stage."""

Lists: TypeAlias = tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]
"""To be filled: the losses of micro-batches, and what was added to them."""


def run(
    built: Built,
    verb: Callable[..., Any],
    batch: tuple[tuple[Any, ...], Any, dict[str, Any]],
    lists: Lists,
    return_outputs: Outputs,
) -> tuple[Any, torch.Tensor | None]:
    """Run a step or an eval: its output, and its loss, which is the same everywhere."""
    for name, wanted in zip(("losses", "aux_losses"), lists, strict=True):
        if wanted is not None:
            require_instance(name, wanted, list, "a list to be filled", BatchError)
    require_one_of("return_outputs", return_outputs, (True, False, "last"), BatchError)
    args, target, options = _on_device(batch, built.ranks.device)
    keywords = {name: value for name, value in options.items() if name not in OPTIONS}
    built.schedule._cutter = built.cutting.fitted(args, keywords)
    found: list[list[torch.Tensor] | None] = [None if wanted is None else [] for wanted in lists]
    try:
        output = verb(
            *args,
            target=target,
            losses=found[0],
            aux_losses=found[1],
            share_losses=True,
            return_outputs=bool(return_outputs),
            **options,
        )
    except StageError as error:
        for story in built.cutting.misfits(args, keywords):
            error.add_note(story)
        raise
    for wanted, filled in zip(lists, found, strict=True):
        if wanted is not None and filled is not None:
            wanted[:] = filled
    ranks = built.ranks
    if return_outputs is True:
        output = shared_output(output, ranks, built.plan.placement.rank_of[-1])
    loss = built.schedule.loss
    return output, None if loss is None else ranks.mean_of_replicas(loss)


def _on_device(values: T, device: torch.device) -> T:
    """The values with tensors of the CPU on this process's device."""
    if device.type == "cpu":
        return values

    def move(tensor: torch.Tensor) -> torch.Tensor:
        on_cpu = tensor.device.type == "cpu"
        return tensor.to(device, non_blocking=True) if on_cpu else tensor

    return pytree.tree_map_only(torch.Tensor, move, values)


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, modules are in evaluation mode; then each as it was."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(in_mode(module, training=False))
        yield
