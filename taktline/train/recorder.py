"""Records the outputs of modules in a forward, and the gradients that reach these outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline import pytree

__all__ = ["ModuleOutput", "Recorded", "Recorder"]


class ModuleOutput(NamedTuple):
    """The name of an output tensor: its module, the call within a forward, and the tensor."""

    module: str
    call: int
    tensor: int


@dataclass(slots=True)
class Recorded:
    """A tensor, and the gradient that has reached it."""

    value: torch.Tensor
    gradient: torch.Tensor | None = None

    def keep_gradient(self, gradient: torch.Tensor) -> None:
        """Keep the first gradient: both halves of a split backward may call this."""
        if self.gradient is None:
            self.gradient = gradient.detach().clone()


@dataclass
class Recorder:
    """The records, forward by forward, in the order in which modules return."""

    forwards: list[dict[ModuleOutput, Recorded]] = field(default_factory=list)

    @contextmanager
    def recording(self, root: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Inside, record outputs of modules in each call of ``root``; not in recomputation."""
        inside, counts = [False], Counter[str]()

        def begin(*_: Any) -> None:
            inside[0] = True
            counts.clear()
            self.forwards.append({})

        def end(*_: Any) -> None:
            inside[0] = False

        def hook(name: str) -> Callable[..., None]:
            def note(module: nn.Module, args: Any, output: Any) -> None:
                if inside[0]:
                    self._note(name, counts[name], output)
                    counts[name] += 1

            return note

        handles = [root.register_forward_pre_hook(begin)]
        handles += [part.register_forward_hook(hook(name)) for name, part in modules.items()]
        handles.append(root.register_forward_hook(end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, call: int, output: Any) -> None:
        # Other classes of tensors are placeholders for values that a stage does not have.
        tensors = [leaf for leaf in pytree.tree_leaves(output) if type(leaf) is torch.Tensor]
        for place, tensor in enumerate(tensors):
            # A copy, as the next module may change it in place.
            entry = Recorded(tensor.detach().clone())
            self.forwards[-1][ModuleOutput(name, call, place)] = entry
            if tensor.requires_grad:
                tensor.register_hook(entry.keep_gradient)
