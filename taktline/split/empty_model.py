"""A copy of a model without data, in which a forward can be recorded.

::

    model                 container: an ancestor of a cut
    ├── embed_tokens      unit: a step of the forward
    ├── layers            container
    │   ├── 0             unit
    │   └── 1             unit; a cut begins a stage here
    ├── rotary_emb        free: has no state, so what it computes are steps
    └── norm              unit
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.hugging_face import disable_cache
from taktline.split.steps import Cut
from taktline.stage.names import unwrapped

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def joined(path: str, key: str) -> str:
    """The full name of a member of a module."""
    return ".".join(filter(None, (path, key)))


def ancestors(name: str) -> list[str]:
    """The names of the modules around a module, from the model on."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def containers_of(model: nn.Module, cuts: Sequence[Cut]) -> frozenset[str]:
    """The ancestors of the cuts, and modules without a forward in them, such as lists."""
    found = {"", *(name for cut in cuts for name in ancestors(cut.unit))}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, _ = name.rpartition(".")
        if parent in found and type(unwrapped(module)).forward is nn.Module.forward:
            found.add(name)
    return frozenset(found)


def units_of(model: nn.Module, cuts: Sequence[Cut]) -> dict[str, nn.Module]:
    """The submodules in the containers that have a state, begin a stage, or have hooks."""
    containers, begin = containers_of(model, cuts), {cut.unit for cut in cuts}
    found: dict[str, nn.Module] = {}
    for container in sorted(containers):
        for key, module in model.get_submodule(container)._modules.items():
            name = joined(container, key)
            if module is None or name in containers:
                continue
            has_state = any(True for _ in module.parameters()) or bool(module.state_dict())
            if has_state or name in begin or has_hooks(module):
                found[name] = module
    places = {name: at for at, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return dict(sorted(found.items(), key=lambda each: places[each[0]]))


def has_hooks(module: nn.Module) -> bool:
    """Whether any module in a module has hooks of its forward or backward."""
    return any(getattr(part, name, None) for part in module.modules() for name in HOOKS)


def require_plain(model: nn.Module, cuts: Sequence[Cut]) -> None:
    """Raise if a module that is cut has hooks, or another forward than its class."""
    for name in sorted(containers_of(model, cuts)):
        module = model.get_submodule(name)
        who = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
        if any(getattr(module, table, None) for table in HOOKS):
            raise PartitionError(
                f"{who} has a hook, but is cut: it runs once, while it is recorded, and no stage "
                "calls it; use a hook of a submodule that is in one stage"
            )
        if "forward" in vars(module):
            raise PartitionError(
                f"the forward of {who} was replaced on this object, by one that may refer to the "
                "whole model; cut the model before its forward is wrapped"
            )


class EmptyModel:
    """A model without data: its parameters, and the buffers of its units, are on the meta device.

    Args:
        model: stays as it is.
        units: the names of the submodules that are steps.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        _require_own_hooks(model)
        self.kind = type(model)
        self.units = tuple(units)
        inside = {id(part) for name in units for part in model.get_submodule(name).modules()}
        memo: dict[int, Any] = {}
        for module in model.modules():
            inner = unwrapped(module)
            if id(inner) not in memo:
                memo[id(inner)] = object.__new__(type(inner))
            memo[id(module)] = memo[id(inner)]
        for module in model.modules():
            is_inside = id(module) in inside
            for tensor in _tensors_of(module):
                if is_inside or isinstance(tensor, nn.Parameter):
                    memo[id(tensor)] = _without_data(tensor)
        for module in model.modules():
            if unwrapped(module) is module:
                made = memo[id(module)]
                made.__dict__ = {k: _copied(v, memo) for k, v in vars(module).items()}
                made.__dict__["_compiled_call_impl"] = None
        self.model: nn.Module = memo[id(model)]
        self.modules = {name: self.model.get_submodule(name) for name in units}
        if "use_cache" not in signature(self.kind.forward).parameters:
            for part in self.model.modules():
                disable_cache(part)
        named = dict(self.model.named_parameters(remove_duplicate=False))
        self.parameters = frozenset(named)
        self.retyped = 0
        """How often the types of tensors have changed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> EmptyModel:
        return self

    def tables(self) -> list[dict[str, Any]]:
        """The tables of all modules with tensors in them."""
        modules = self.model.modules()
        return [table for m in modules for table in (m._parameters, m._buffers, vars(m))]

    def replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace all parameters, buffers and other tensors in attributes."""
        made: dict[int, torch.Tensor] = {}
        for table in self.tables():
            for key, tensor in table.items():
                if isinstance(tensor, torch.Tensor):
                    if id(tensor) not in made:
                        made[id(tensor)] = change(tensor)
                    table[key] = made[id(tensor)]

    @contextmanager
    def filled(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Replace all parameters and buffers for a while."""
        before = [
            (table, {k: t for k, t in table.items() if isinstance(t, torch.Tensor)})
            for table in self.tables()
        ]
        self.replace(change)
        try:
            yield
        finally:
            for table, tensors in before:
                table.update(tensors)

    def follow_types(self, stage: nn.Module) -> None:
        """Change the types of all tensors as those of a stage have changed since they were made."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        named = (*stage.named_parameters(), *stage.named_buffers())
        pairs = [(own[name].dtype, tensor.dtype) for name, tensor in named if name in own]
        types = {before: after for before, after in pairs if before is not after}

        def retyped(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype not in types:
                return tensor
            return _like(tensor.detach().to(types[tensor.dtype]), tensor)

        for name, buffer in stage.named_buffers():
            if own.get(name) is not None and own[name].dtype is buffer.dtype in types:
                raise PartitionError(
                    f"the type of the model has changed since it was cut, from {buffer.dtype}, but "
                    f"not that of the buffer {name!r}, which its stages have; change the type of "
                    "the stages, or before the model is cut"
                )
        if types:
            self.replace(retyped)
            self.retyped += 1


def _like(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    meta = (
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.layout is torch.strided
        else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    )
    return _like(meta, tensor)


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    tables = (module._parameters, module._buffers, vars(module))
    return [t for table in tables for t in table.values() if isinstance(t, torch.Tensor)]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, or the value itself if it cannot be copied, such as a lock."""
    with suppress(Exception):
        return copy.deepcopy(value, memo)
    return value


def _require_own_hooks(model: nn.Module) -> None:
    """Raise if a hook has the model itself, or what it keeps: the recorded copy has others."""
    kept = {id(module): "the model" for module in model.modules() if module._modules}
    for module in model.modules():
        tables = {key: v for key, v in vars(module).items() if key not in _TABLES}
        kept |= {id(v): repr(key) for key, v in tables.items() if isinstance(v, (dict, list))}
    for name, module in model.named_modules():
        for hook in (hook for table in HOOKS[:2] for hook in getattr(module, table).values()):
            cells = getattr(hook, "__closure__", None) or ()
            inside = [cell.cell_contents for cell in cells]
            found = next((kept[id(each)] for each in inside if id(each) in kept), None)
            if found is not None:
                raise PartitionError(
                    f"a hook of {name!r} refers to {found}, of which its stage has only a part; "
                    "let the hook keep what it needs in an attribute of its own module, the first "
                    "argument of hooks"
                )


_TABLES = frozenset(vars(nn.Module()))
