"""Adds small gradients to their buffers, many at a time.

Autograd adds each one by itself: of a model with small parameters, these are a third of all kernels
of a graph, each of which takes longer to begin than to run. Large ones are left to autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from taktline.stage.engine import SMALL, add_all

__all__ = ["Adding"]

_MOST = 16 * 2**20
"""How many bytes of gradients may wait to be added."""


class Adding:
    """The gradients that wait to be added, each parameter's in the order in which they came.

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
        """Inside, each ``.grad`` is None, and what comes there is taken; then it is the buffer."""
        nodes: list[object] = []  # which would be made anew, without their hooks
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
        """Take what did not come by autograd, such as W's; to be called after each action."""
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
