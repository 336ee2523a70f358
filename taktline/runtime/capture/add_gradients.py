"""Adds gradients to their buffers, small ones many at a time.

Autograd adds each gradient by itself: in a model with small parameters, a third of all kernels of a
graph, each of which takes longer to launch than to run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn

from taktline.stage import autograd_engine

__all__ = ["Adding"]

_MOST = 16 * 2**20
"""The most bytes of gradients that wait to be added."""


class Adding:
    """Gradients that wait to be added, those of a parameter in the order of arrival.

    >>> layer, buffer = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> with Adding({layer.weight: buffer}).instead():
    ...     layer(torch.ones(1, 1)).backward()
    >>> buffer, layer.weight.grad is buffer
    (tensor([[2.]]), True)
    """

    def __init__(self, buffers: Mapping[nn.Parameter, torch.Tensor]) -> None:
        self._buffers: dict[torch.Tensor, torch.Tensor]
        self._buffers = {p: buffer for p, buffer in buffers.items() if p.requires_grad}
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}
        self._bytes = 0
        self.in_turn: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context in which gradients are added."""

    @contextmanager
    def instead(self) -> Iterator[Adding]:
        """Inside, new gradients are taken from ``.grad``; afterwards ``.grad`` is the buffer."""
        with ExitStack() as stack:
            for parameter, buffer in self._buffers.items():
                hook = parameter.register_post_accumulate_grad_hook(self)
                stack.callback(hook.remove)
                stack.callback(setattr, parameter, "grad", buffer)
                parameter.grad = None
            yield self
            self.take_all()
            self.add()

    def take_all(self) -> None:
        """Take gradients that did not come by autograd, such as those of W; after each action."""
        for parameter in self._buffers:
            self(parameter)

    def add(self) -> None:
        """Add all gradients that wait."""
        with self.in_turn():
            _add_all([self._buffers[p] for p in self._waiting], list(self._waiting.values()))
        self._waiting.clear()
        self._bytes = 0

    def __call__(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter, if it has one."""
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        if parameter in self._waiting:
            self.add()
        self._waiting[parameter] = gradient
        self._bytes += gradient.nbytes
        if self._bytes > _MOST:
            self.add()


def _add_all(buffers: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add gradients to buffers, small ones of the same types in one operation."""
    alike: defaultdict[object, tuple[list[torch.Tensor], list[torch.Tensor]]]
    alike = defaultdict(lambda: ([], []))
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if buffer.nbytes > autograd_engine.SMALL:
            buffer.add_(gradient)
            continue
        kind = type(buffer), buffer.dtype, type(gradient), gradient.dtype
        alike[kind][0].append(buffer)
        alike[kind][1].append(gradient)
    for ours, theirs in alike.values():
        torch._foreach_add_(ours, theirs)  # pyright: ignore[reportPrivateImportUsage]
