"""Names of parameters, buffers and modules as in the user's model, without wrappers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_INSIDE = ("_orig_mod", "_checkpoint_wrapped_module")
"""The attributes in which ``torch.compile`` and checkpoint wrappers keep the wrapped module."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside of DDP, ``torch.compile`` and checkpoint wrappers."""
    names = ("module",) if isinstance(module, DistributedDataParallel) else _INSIDE
    inside = next((module._modules[name] for name in names if name in module._modules), None)
    return module if inside is None else unwrapped(inside)


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by their names in the user's model, tied ones by each of their names.

    >>> from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    >>> stage = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    >>> list(named_parameters(stage))
    ['0.weight', '0.bias']
    """
    return {
        f"{path}{name}": parameter
        for path, inner in _walk(module, "")
        for name, parameter in inner._parameters.items()
        if parameter is not None
    }


def named_modules(module: nn.Module) -> dict[str, nn.Module]:
    """All modules by their names in the user's model, without wrappers."""
    return {path.removesuffix("."): inner for path, inner in _walk(module, "")}


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """A faster ``module.parameters()``, for every step."""
    own = (type(module).parameters, type(module).named_parameters)
    if own != (nn.Module.parameters, nn.Module.named_parameters):
        return list(module.parameters())
    found: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [module]
    while waiting:
        inner = waiting.pop()
        if inner is None or id(inner) in seen:
            continue
        seen.add(id(inner))
        for parameter in inner._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
        if inner._modules:
            waiting.extend(reversed(inner._modules.values()))
    return list(found.values())


def named_buffers(module: nn.Module, *, persistent: bool = False) -> dict[str, torch.Tensor]:
    """All buffers by their names in the user's model, or only those of a state dict."""
    return {
        f"{path}{name}": buffer
        for path, inner in _walk(module, "")
        for name, buffer in inner._buffers.items()
        if buffer is not None and not (persistent and name in inner._non_persistent_buffers_set)
    }


def _walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    inner = unwrapped(module)
    yield path, inner
    for name, child in inner._modules.items():
        if child is not None:
            yield from _walk(child, f"{path}{name}.")
