"""The parameters and buffers of a module that is cut, and their names in a stage."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of a module that a graph uses."""

    value: Any
    persistent: bool = False
    """Whether a buffer is part of the state dict."""

    def install(self, module: nn.Module, name: str) -> None:
        """Put the attribute into a module, under a name with dots."""
        *path, last = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if isinstance(self.value, nn.Parameter):
            module.register_parameter(last, self.value)
        elif isinstance(self.value, torch.Tensor):
            module.register_buffer(last, self.value, persistent=self.persistent)
        elif isinstance(self.value, nn.Module):
            module.add_module(last, self.value)
        else:
            setattr(module, last, self.value)


class State:
    """The parameters and buffers of a module by name."""

    def __init__(self, module: nn.Module) -> None:
        lasting = set(module.state_dict(keep_vars=True))
        named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        named.update(module.named_buffers(remove_duplicate=False))
        self._attributes = {
            name: Attribute(value, persistent=name in lasting) for name, value in named.items()
        }
        self._names: dict[int, list[str]] = {}
        for name, value in named.items():
            self._names.setdefault(id(value), []).append(name)
        self.order = {name: place for place, name in enumerate(named)}

    def attribute(self, traced: nn.Module, name: str) -> Attribute:
        """The module's own attribute of a name, or a constant of the trace."""
        return self._attributes.get(name) or Attribute(attrgetter(name)(traced))

    def name_for(self, name: str, user: fx.Node) -> str:
        """The name of an attribute in the submodule that uses it.

        A trace has one name for a tensor; the module may have several, one in each submodule.
        """
        if name not in self._attributes:
            return name
        names = self._names[id(self._attributes[name].value)]
        if len(names) == 1:
            return name
        for path in reversed(_paths(user)):
            inside = [known for known in names if known.rpartition(".")[0] == path]
            if inside:
                return name if name in inside else inside[0]
        return name


def _paths(node: fx.Node) -> list[str]:
    """The submodules around the call of a node, from the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    # The second call of a submodule is called name@1.
    return [str(path).partition("@")[0] for path, _ in stack.values()]
