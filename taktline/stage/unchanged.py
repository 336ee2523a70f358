"""Runs modules for what can be learned from it, and leaves them as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the gradients and buffers of modules as they are; inside, there are no gradients.

    >>> norm = nn.BatchNorm1d(2)
    >>> with unchanged([norm]):
    ...     norm(torch.ones(3, 2)).sum().backward()
    >>> norm.running_mean, norm.weight.grad
    (tensor([0., 0.]), None)
    """
    inner = [each for module in modules for each in module.modules()]
    buffers = [
        (each._buffers, name, buffer, buffer.detach().clone())
        for each in inner
        for name, buffer in each._buffers.items()
        if buffer is not None
    ]
    parameters = (parameter for each in inner for parameter in each.parameters(recurse=False))
    gradients = {parameter: parameter.grad for parameter in parameters}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for table, name, buffer, value in buffers:
                buffer.copy_(value)
                table[name] = buffer  # it may have been replaced
