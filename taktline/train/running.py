"""Steps and blocks, run on every rank of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from taktline.checks import require_instance, require_one_of
from taktline.errors import BatchError
from taktline.runtime.schedule import Schedule
from taktline.train.build import Built
from taktline.train.outputs import shared_output

__all__ = ["Outputs", "evaluating", "run", "together"]

T = TypeVar("T")

Outputs: TypeAlias = bool | Literal["last"]
"""Whether outputs are given on every rank, or only where they come into being."""

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

    def one(rank: int) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        losses: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        output = verb(
            built.schedules[rank],
            *args,
            target=target,
            losses=losses,
            aux_losses=added,
            share_losses=True,
            return_outputs=bool(return_outputs),
            **options,
        )
        return output, losses, added

    ranks = built.ranks
    results = ranks.each(one)
    for wanted, found in zip(lists, results[0][1:], strict=True):
        if wanted is not None:
            wanted[:] = found
    output = next((output for output, *_ in results if output is not None), None)
    if return_outputs is True:
        output = shared_output(output, ranks, built.plan.placement.rank_of[-1])
    loss = built.schedules[ranks.own[0]].loss
    if loss is not None and ranks.replicas > 1:
        loss = torch.tensor(ranks.mean_of_copies(float(loss)), dtype=loss.dtype, device="cpu")
    return output, loss


def _on_device(values: T, device: torch.device) -> T:
    """The values with tensors of the CPU on this process's device."""
    if device.type == "cpu":
        return values

    def move(tensor: torch.Tensor) -> torch.Tensor:
        on_cpu = tensor.device.type == "cpu"
        return tensor.to(device, non_blocking=True) if on_cpu else tensor

    return pytree.tree_map_only(torch.Tensor, move, values)


@contextmanager
def together(
    built: Built, block: Callable[[Schedule], AbstractContextManager[T]]
) -> Iterator[list[T]]:
    """A block of every rank, entered and left on that rank."""
    blocks = {rank: block(schedule) for rank, schedule in built.schedules.items()}
    inside: dict[int, T] = {}

    def enter(rank: int) -> None:
        inside[rank] = blocks[rank].__enter__()

    def leave(error: BaseException | None) -> None:
        told = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        # If one could not be entered, those that were are left.
        built.ranks.each(lambda rank: rank in inside and blocks[rank].__exit__(*told))

    try:
        built.ranks.each(enter)
        yield [inside[rank] for rank in built.ranks.own]
    except BaseException as error:
        leave(error)
        raise
    leave(None)


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, modules are in evaluation mode; then each as it was."""
    modes = {module: {inner: inner.training for inner in module.modules()} for module in modules}
    try:
        for module in modes:
            module.eval()
        yield
    finally:
        for module, inner in modes.items():
            module.train(inner[module])
            for part, mode in inner.items():
                part.training = mode
