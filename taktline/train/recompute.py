"""Activation checkpointing: blocks of a stage keep their inputs, and run again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.utils.checkpoint import checkpoint

from taktline.errors import MismatchError
from taktline.runtime.introduction import BUILDING
from taktline.split.recorded_stage import units_of
from taktline.train.ranks import Ranks

Checkpoint: TypeAlias = Literal["blocks"] | Callable[[str, nn.Module], bool]
"""All blocks, or those for whose name in the model and module a function returns True."""
_LISTS = (nn.ModuleList, nn.ModuleDict)
_ROWS = (*_LISTS, nn.Sequential)


def check_checkpoint(name: str, value: Any) -> Any:
    """Raise unless this is a choice of blocks."""
    if value == "blocks" or (callable(value) and not isinstance(value, nn.Module)):
        return value
    raise MismatchError(
        f"{name} is 'blocks', or a function of a submodule's name and the submodule that returns "
        f"whether to checkpoint it, not {value!r}"
    )


def recompute(stage: nn.Module, chosen: Checkpoint) -> None:
    """Checkpoint the chosen submodules of a stage, without re-entering autograd.

    Inside of a chosen one, none is. "blocks" are the members of lists and sequences.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    >>> recompute(model, lambda name, module: isinstance(module, nn.Sequential))
    >>> [name for name, part in model.named_modules() if "forward" in vars(part)]
    ['1']
    """
    units = units_of(stage)
    inside: tuple[str, ...] = ()
    for name, module in stage.named_modules():
        called = units is None or f"{name}.".startswith(tuple(f"{unit}." for unit in units))
        if not name or not called or name.startswith(inside) or isinstance(module, _LISTS):
            continue
        if chosen == "blocks":
            parts = name.split(".")[:-1]
            around = (".".join(parts[:depth]) for depth in range(len(parts) + 1))
            # A stage that was cut out of a sequence has its members, by their numbers.
            wanted = name.isdigit() or any(
                isinstance(stage.get_submodule(each), _ROWS) for each in around
            )
        else:
            wanted = chosen(name, module)
        if wanted:
            inside += (f"{name}.",)
            # An earlier pipeline of this model may have done it.
            if not _is_checkpointed(module):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def require_some(stages: Sequence[nn.Module], ranks: Ranks) -> None:
    """Raise on all ranks if no block of any stage is checkpointed."""
    mine = any(_is_checkpointed(module) for stage in stages for module in stage.modules())
    if not any(ranks.processes.everywhere(lambda: mine, "checkpoint blocks", BUILDING)):
        names = [name for stage in stages for name, _ in stage.named_modules() if name]
        raise MismatchError(
            "checkpoint= chooses no submodule of any stage, which are called "
            f"{', '.join(map(repr, names[:6]))}{', …' * (len(names) > 6)} here; leave it out, or "
            "pass a function that returns True for some"
        )


def _is_checkpointed(module: nn.Module) -> bool:
    return getattr(module.forward, "func", None) is checkpoint
