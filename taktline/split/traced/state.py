"""The parameters and buffers of a module that is cut, and their names in a stage."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn


class State:
    """The parameters and buffers of a module by name, and the constants of its traces."""

    def __init__(self, module: nn.Module) -> None:
        self._lasting = set(module.state_dict(keep_vars=True))
        self._own: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        self._own.update(module.named_buffers(remove_duplicate=False))
        self._names: dict[int, list[str]] = {}
        for name, value in self._own.items():
            self._names.setdefault(id(value), []).append(name)
        self._constants: dict[str, Any] = {}
        """Tensors and regions, under names that differ in each trace."""

    def name_for(self, traced: nn.Module, name: str, user: fx.Node) -> str:
        """The name in a stage for an attribute of a trace that a node uses.

        A trace has one name for a tensor; the module may have several, one in each submodule.
        """
        if name not in self._own:
            value = attrgetter(name)(traced)
            while name in self._own or self._constants.setdefault(name, value) is not value:
                name += "_"
            return name
        names = self._names[id(self._own[name])]
        if len(names) == 1:
            return name
        for path in reversed(_paths(user)):
            inside = [known for known in names if known.rpartition(".")[0] == path]
            if inside:
                return name if name in inside else inside[0]
        return name

    def parameters(self, names: Collection[str]) -> set[str]:
        """Those of some names that are parameters."""
        return {name for name in names if isinstance(self._own.get(name), nn.Parameter)}

    def install(self, stage: nn.Module, names: Collection[str]) -> None:
        """Put what has these names into a stage, in the order of the module."""
        for name, value in (self._own | self._constants).items():
            if name in names:
                _install(stage, name, value, persistent=name in self._lasting)


def _paths(node: fx.Node) -> list[str]:
    """The submodules around the call of a node, from the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    # The second call of a submodule is called name@1.
    return [str(path).partition("@")[0] for path, _ in stack.values()]


def _install(module: nn.Module, name: str, value: Any, *, persistent: bool) -> None:
    """Put an attribute into a module, under a name with dots."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(last, value, persistent=persistent)
    else:
        setattr(module, last, value)
