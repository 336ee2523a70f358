"""Adds small gradients to their buffers, many at a time.

Autograd adds each gradient by itself: in a model with small parameters, a third of all kernels of a
graph, each of which takes longer to launch than to run. Autograd still adds large gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from taktline.stage.autograd_engine import SMALL, add_all

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
        self._buffers = {
            parameter: buffer
            for parameter, buffer in buffers.items()
            if parameter.requires_grad and buffer.nbytes <= SMALL
        }
        self._waiting: dict[nn.Parameter, torch.Tensor] = {}
        self._bytes = 0

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside, new gradients are taken from ``.grad``; afterwards ``.grad`` is the buffer."""
        nodes: list[object] = []  # kept: new nodes would have no hooks
        with ExitStack() as stack:
            for parameter, buffer in self._buffers.items():
                node = get_gradient_edge(parameter).node
                nodes.append(node)
                stack.callback(node.register_hook(partial(self._take, parameter)).remove)
                stack.callback(setattr, parameter, "grad", buffer)
                parameter.grad = None
            yield
            self.take_all()
            self._add()

    def take_all(self) -> None:
        """Take gradients that did not come by autograd, such as those of W; after each action."""
        for parameter in self._buffers:
            self._take(parameter)

    def _take(self, parameter: nn.Parameter, *_: object) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        if parameter in self._waiting:
            self._add()
        self._waiting[parameter] = gradient
        self._bytes += gradient.nbytes
        if self._bytes > _MOST:
            self._add()

    def _add(self) -> None:
        add_all([self._buffers[p] for p in self._waiting], list(self._waiting.values()))
        self._waiting.clear()
        self._bytes = 0
