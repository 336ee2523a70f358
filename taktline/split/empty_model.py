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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import disable_cache
from taktline.split.steps import Cut
from taktline.stage.names import unwrapped

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def joined(path: str, key: str) -> str:
    """The full name of a member of a module."""
    return ".".join(filter(None, (path, key)))


def ancestors(name: str) -> list[str]:
    """The names of the modules around a module, from the model on."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts))]


class EmptyModel:
    """A model without data: its parameters, and the buffers of its units, are on the meta device.

    Args:
        model: stays as it is.
        cuts: what is around these is opened.
        opened: more modules to open.
    """

    def __init__(self, model: nn.Module, cuts: Sequence[Cut], opened: Collection[str] = ()) -> None:
        _require_own_hooks(model)
        self.kind = type(model)
        units = _units_of(model, cuts, opened)
        inside = {id(part) for name in units for part in model.get_submodule(name).modules()}
        memo: dict[int, Any] = {}
        for module in model.modules():
            inner = unwrapped(module)
            memo[id(module)] = memo.setdefault(id(inner), object.__new__(type(inner)))
            for tensor in (t for _, tensors in _tables_of(module) for t in tensors.values()):
                if id(module) in inside or isinstance(tensor, nn.Parameter):
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
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        self.parameters = frozenset(parameters)
        insides = tuple(f"{name}." for name in units)
        self.own = [name for name in (*parameters, *buffers) if not name.startswith(insides)]
        """The parameters and buffers that are in no unit."""
        self.seen: set[int] = set()
        """The lines of forwards that were recorded twice."""
        self.retyped = 0
        """How often the types of tensors have changed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> EmptyModel:
        return self

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> list[_Table]:
        """Replace all parameters, buffers and other tensors in attributes; returns those before."""
        before = [table for module in self.model.modules() for table in _tables_of(module)]
        made: dict[int, torch.Tensor] = {}
        for table, tensors in before:
            for key, tensor in tensors.items():
                if id(tensor) not in made:
                    made[id(tensor)] = change(tensor)
                table[key] = made[id(tensor)]
        return before

    @contextmanager
    def filled(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Replace all parameters and buffers for a while."""
        before = self._replace(change)
        try:
            yield
        finally:
            for table, tensors in before:
                table.update(tensors)

    def follow_types(self, stage: nn.Module) -> None:
        """Change the types of all tensors as those of a stage have changed since they were made."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        named = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
        pairs = {name: (own[name].dtype, t.dtype) for name, t in named.items() if name in own}
        types = {before: after for before, after in pairs.values() if before is not after}
        # In FSDP, parameters have other types in each call, and nothing else has.
        is_sharded = any(hasattr(part, "unshard") for part in stage.modules())
        for name, (before, after) in pairs.items() if not is_sharded else ():
            if before is after and after in types and name not in self.parameters:
                raise PartitionError(
                    f"the type of the model has changed since it was cut, from {before}, but not "
                    f"that of the buffer {name!r}, which its stages have; change the type of the "
                    "stages, or before the model is cut"
                )

        def retyped(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype not in types or (is_sharded and not isinstance(tensor, nn.Parameter)):
                return tensor
            return _like(tensor.detach().to(types[tensor.dtype]), tensor)

        if types:
            self._replace(retyped)
            self.retyped += 1


def _units_of(model: nn.Module, cuts: Sequence[Cut], opened: Collection[str]) -> list[str]:
    """The submodules in containers that have a state, begin a stage, or have hooks.

    Containers are the ancestors of the cuts, and modules without a forward in them, such as lists.
    """
    begin, found = {cut.unit for cut in cuts}, list[str]()
    containers = {"", *opened, *(name for unit in (*begin, *opened) for name in ancestors(unit))}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and name.rpartition(".")[0] not in containers:
            continue
        if name in containers or type(unwrapped(module)).forward is nn.Module.forward:
            containers.add(name)
            _require_plain(name, module)
        elif name in begin or _has_state(module) or any(map(_has_hooks, module.modules())):
            found.append(name)
    return found


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or bool(module.state_dict())


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)


def _require_plain(name: str, module: nn.Module) -> None:
    """Raise if a module that is cut has hooks, or another forward than its class."""
    who = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
    if _has_hooks(module):
        raise PartitionError(
            f"{who} has a hook, but is cut: it runs once, while it is recorded, and no stage "
            "calls it; use a hook of a submodule that is in one stage"
        )
    forward: Any = vars(module).get("forward")
    is_method = getattr(forward, "__self__", None) is module and not forward.__func__.__closure__
    if forward is not None and not is_method:
        raise PartitionError(
            f"the forward of {who} was replaced on this object, by one that may refer to the "
            "whole model; cut the model before its forward is wrapped"
        )


def _require_own_hooks(model: nn.Module) -> None:
    """Raise if a hook has the model itself, or what it keeps: the recorded copy has others."""
    kept = {id(module): "the model" for module in model.modules() if module._modules}
    for module in model.modules():
        own = {key: vars(module)[key] for key in vars(module).keys() - vars(nn.Module()).keys()}
        kept |= {id(v): repr(key) for key, v in own.items() if isinstance(v, (dict, list))}
    for name, module in model.named_modules():
        for hook in (hook for table in _HOOKS[:2] for hook in getattr(module, table).values()):
            found = None
            for cell in getattr(hook, "__closure__", None) or ():
                with suppress(ValueError):  # a name that has no value
                    found = found or kept.get(id(cell.cell_contents))
            if found:
                raise PartitionError(
                    f"a hook of {name!r} refers to {found}, of which its stage has only a part; "
                    "let the hook keep what it needs in an attribute of its own module, the first "
                    "argument of hooks"
                )


_Table = tuple[dict[str, Any], dict[str, torch.Tensor]]


def _tables_of(module: nn.Module) -> list[_Table]:
    """The tables of a module that have tensors in them, with these."""
    tables = (module._parameters, module._buffers, vars(module))
    return [(t, {k: v for k, v in t.items() if isinstance(v, torch.Tensor)}) for t in tables]


def _like(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    how: Any = {"dtype": tensor.dtype, "device": "meta"}
    if tensor.layout is not torch.strided:
        return _like(torch.empty(tensor.shape, **how), tensor)
    return _like(torch.empty_strided(tensor.shape, tensor.stride(), **how), tensor)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, or the value itself if it cannot be copied, such as a lock."""
    with suppress(Exception):
        return copy.deepcopy(value, memo)
    return value
