"""Refuses steps of optimizers whose parameters a pipeline has replaced.

FSDP2 replaces parameters by shards. An optimizer of the old parameters would step without an error,
and train nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from taktline.errors import MismatchError

_names: Any = WeakIdKeyDictionary()
"""The names of parameters that were replaced."""
_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""For each optimizer, how many names there were when it was checked."""
_noted = 0


def note_replaced(
    before: Mapping[str, torch.Tensor], now: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Note the parameters that were replaced: optimizers of these raise in their step."""
    global _noted
    now = list(now)
    kept = {id(parameter) for _, parameter in now}
    replaced = {
        name: before[name]
        for name, parameter in now
        if name in before and before[name] is not parameter and id(before[name]) not in kept
    }
    if replaced and not _noted:
        register_optimizer_step_pre_hook(_check)
    for name, parameter in replaced.items():
        _names[parameter] = name
    _noted += len(replaced)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before the step of an optimizer whose parameters were replaced."""
    if _checked.get(optimizer) == _noted:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _names:
                raise MismatchError(
                    f"this {type(optimizer).__name__} was made before the pipeline, which has "
                    f"replaced the parameter {_names[parameter]!r}, as FSDP does, so it would "
                    "train nothing; make it with pipe.parameters()"
                )
    _checked[optimizer] = _noted
