"""Containers: the modules that cuts go through. Each stage has a copy of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch import nn

from taktline.errors import PartitionError
from taktline.split.named.forward_summary import Cut
from taktline.split.named.placeholder import Placeholder
from taktline.split.named.recurrent import Layer
from taktline.stage.names import unwrapped

_TABLES = {key for key, value in vars(nn.Module()).items() if isinstance(value, (dict, set))}
"""Buffers, hooks and the like: registering one with a copy must not change the model."""


def copied(
    container: nn.Module,
    path: str,
    containers: frozenset[str],
    child: Callable[[str, nn.Module], nn.Module | None],
    parameter: Callable[[str, nn.Parameter], nn.Parameter | Placeholder] = lambda _, own: own,
) -> nn.Module:
    """A copy of a container and of the containers in it.

    ``child`` and ``parameter`` return what replaces a unit and a parameter; None leaves out a unit.
    """
    _require_free(container, path)
    made = object.__new__(type(container))
    made.__dict__ = _own_tables(container)
    made._compiled_call_impl = None  # it would run the whole model
    made._modules, made._parameters = {}, {}
    for key, module in container._modules.items():
        name = joined(path, key)
        if module is None:
            made._modules[key] = None
        elif name in containers:
            made._modules[key] = copied(module, name, containers, child, parameter)
        elif (substitute := child(name, module)) is not None:
            made._modules[key] = substitute
    for key, value in container._parameters.items():
        substitute = value if value is None else parameter(joined(path, key), value)
        if isinstance(substitute, Placeholder):
            vars(made)[key] = substitute
        else:
            made._parameters[key] = substitute
    return made


def containers_of(model: nn.Module, cuts: Sequence[Cut]) -> frozenset[str]:
    """The ancestors of the cuts, and modules without a forward in them, such as lists."""
    found = {"", *(name for cut in cuts for name in ancestors(cut.unit))}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, _ = name.rpartition(".")
        if parent in found and type(unwrapped(module)).forward is nn.Module.forward:
            found.add(name)
    return frozenset(found)


def ancestors(name: str) -> list[str]:
    """The names of the modules around a module, from the model on."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def is_unit(module: nn.Module) -> bool:
    """Whether a submodule has a state, so that it must lie in one stage."""
    return isinstance(module, Layer) or bool(module.state_dict(keep_vars=True))


def _require_free(container: nn.Module, path: str) -> None:
    """Raise if a copy of a container would still refer to the whole model."""
    who = f"{path!r} ({type(container).__name__})" if path else type(container).__name__
    if "forward" in vars(container):
        raise PartitionError(
            f"the forward of {who} was replaced on this object, by one that does not work in "
            "stages; cut the model before its forward is wrapped"
        )
    for name, value in vars(container).items():
        held = value.values() if isinstance(value, dict) else value
        if name in _TABLES or not isinstance(value, (dict, list, tuple)):
            held = () if isinstance(value, MethodType) else (getattr(value, "__self__", None),)
        if any(isinstance(part, nn.Module) and is_unit(part) for part in held):
            raise PartitionError(
                f"{who} keeps submodules in its attribute {name!r}, where they cannot be replaced "
                "in the stages that do not have them; use a ModuleList or a ModuleDict"
            )


def with_own_tables(module: nn.Module) -> nn.Module:
    """A copy of a module and its submodules, with the same tensors."""
    made = object.__new__(type(module))
    made.__dict__ = _own_tables(module)
    made._modules = {
        key: None if child is None else with_own_tables(child)
        for key, child in module._modules.items()
    }
    return made


def _own_tables(module: nn.Module) -> dict[str, Any]:
    return {
        key: copy.copy(value) if key in _TABLES else value for key, value in vars(module).items()
    }


def joined(path: str, key: str) -> str:
    """The full name of a member of a module."""
    return ".".join(filter(None, (path, key)))
