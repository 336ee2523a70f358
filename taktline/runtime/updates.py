"""Whether gradients of earlier steps wait for an optimizer: then a save would lose an update."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from taktline.meta import local

times = itertools.count(1)
"""The time, counted in steps of schedules and of optimizers."""
_stepped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""When each optimizer of this process has stepped last."""


@cache
def watch() -> None:
    """Note the steps of all optimizers from now on."""
    register_optimizer_step_post_hook(
        lambda optimizer, *_: _stepped.update({optimizer: next(times)})
    )


def wait(parameters: Iterable[nn.Parameter], since: int) -> bool:
    """Whether gradients wait for an optimizer, after a step at the time ``since``.

    Those that are zero do not, nor those of parameters that no optimizer ever changes.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> model(torch.ones(2)).backward()
    >>> watch()
    >>> since = next(times)
    >>> wait(model.parameters(), since)
    True
    >>> optimizer.step()
    >>> wait(model.parameters(), since)
    False
    """
    found = {id(each): each.grad for each in parameters if each.grad is not None}
    changed: set[int] = set()
    late: set[int] = set()
    for optimizer, when in list(_stepped.items()):
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        (changed if when > since else late).update(held & found.keys())
    left = (late if changed or late else found.keys()) - changed
    grads = (found[key] for key in left)
    dense = (grad.coalesce().values() if grad.is_sparse else grad for grad in grads)
    return any(bool(local(each).any()) for each in dense)
