"""Values that a stage is given, and may want to change in place.

Autograd refuses to change in place what a backward ends with; a copy can be changed. Whether a
stage changes anything is seen in its first call of a kind, by the versions of copies; where it does
not, later calls have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from taktline import pytree
from taktline.split.named.recent import Recent
from taktline.split.named.shape_probe import look

__all__ = ["Lent", "copies"]


class Lent:
    """What is known of the calls of a stage that takes one value."""

    __slots__ = ("_changed",)

    def __init__(self) -> None:
        self._changed: Recent[bool] = Recent()

    def run(self, forward: Callable[[Any], Any], value: Any, training: bool) -> Any:
        """Call a function with a value, or with a copy of it."""
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            return forward(value)
        kind = (look(value), training)
        changed = self._changed.get(kind)
        if changed is False:
            return forward(value)
        value, made = copies(value)
        output = forward(value)
        if changed is None:
            self._changed.keep(kind, any(copy._version for copy in made))
        return output


def copies(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """A tree with copies of all that autograd keeps from being changed; and these."""
    made: list[torch.Tensor] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        made.append(tensor.clone())
        return made[-1]

    return pytree.tree_map_only(torch.Tensor, copied, tree), made
