"""Finds out whether a forward is plain: it always calls the same submodules in the same way.

A plain forward has assignments, conditions, loops over its submodules, and arithmetic. It calls
plain functions, and functions of torch that read no data. Its attributes and globals are numbers
and the like; guards notice when one of them changes::

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

So all calls with the same shapes do the same, if a dry run has seen that the forward reads no
number from a tensor, as in a condition, and draws no random numbers.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence, Sized
from dis import get_instructions
from inspect import CO_VARARGS, CO_VARKEYWORDS, getattr_static
from types import FunctionType
from typing import Any

import torch
from torch import nn

from taktline.split.named.changes import HOOKS
from taktline.split.named.containers import joined
from taktline.split.named.layout import Layout
from taktline.split.named.mutable import is_constant
from taktline.split.named.placeholder import Placeholder
from taktline.split.named.units import ROWS


class Guards:
    """Values that must not change, so that a plain forward makes the same calls."""

    __slots__ = ("_parts", "_sizes", "_values")

    def __init__(self) -> None:
        self._values: list[tuple[Mapping[str, Any], str, Any]] = []
        self._parts: list[Sized] = []
        self._sizes: list[int] = []

    def watch(self, values: Mapping[str, Any], name: str) -> None:
        """Guard a value in a table."""
        self._values.append((values, name, values[name]))

    def watch_size(self, parts: Sized) -> None:
        """Guard the number of parts of a container, such as hooks."""
        self._parts.append(parts)
        self._sizes.append(len(parts))

    def hold(self) -> bool:
        """Whether nothing has changed."""
        for values, name, value in self._values:
            found = values.get(name)
            if found is not value and (type(found) is not type(value) or found != value):
                return False
        return list(map(len, self._parts)) == self._sizes


_CODES = (
    *("RESUME", "NOP", "NOT_TAKEN", "CACHE", "EXTENDED_ARG", "COPY", "SWAP", "PUSH_NULL"),
    *("POP_TOP", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "PRECALL", "KW_NAMES", "CALL"),
    *("CALL_KW", "GET_ITER", "FOR_ITER", "END_FOR", "POP_ITER", "UNPACK_SEQUENCE", "BUILD_TUPLE"),
    *("BUILD_SLICE", "COMPARE_OP", "IS_OP", "TO_BOOL", "RETURN_VALUE", "RETURN_CONST"),
)
_FAMILIES = ("LOAD_FAST", "STORE_FAST", "BINARY_", "UNARY_", "JUMP_", "POP_JUMP_")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
"""The bytecode of plain functions, since Python 3.11: it sets local variables alone."""
_MODULES = (torch, nn.functional)
_LOOPS = ("range", "enumerate", "zip", "reversed", "len")
_OPERATIONS = (
    *("arange", "cat", "contiguous", "device", "dim", "dropout", "dtype", "expand", "flatten"),
    *("gelu", "mean", "ndim", "numel", "ones", "permute", "relu", "reshape", "shape", "size"),
    *("softmax", "sqrt", "squeeze", "stack", "sum", "tanh", "transpose", "unsqueeze", "view"),
    "zeros",
)
"""Functions and attributes of torch that read no data, and change nothing but generators."""
_CHILDREN = ("children", "items", "keys", "named_children", "values")


class _NotPlain(Exception):
    """Another call may do something else."""


def guards_of(layout: Layout, stage_module: nn.Module) -> Guards | None:
    """The guards of the plain forward of a stage; None if it is not plain."""
    containers = layout.containers_in(stage_module)
    guards = Guards()
    reader = _Reader(list(containers.values()), guards)
    try:
        _watch_hooks(layout.hooked, guards)
        for hooks in HOOKS:
            _watch_hooks(getattr(nn.modules.module, f"_global{hooks}"), guards)
        for name, container in containers.items():
            owner = type(container) if name else layout.model_class
            if owner not in ROWS:
                _require_own_methods(owner)
                reader.read(owner.forward)
            guards.watch_size(container._modules)
            for key, module in container._modules.items():
                path = joined(name, key)
                if module is not None and path not in layout.probes:
                    guards.watch(container._modules, key)
                    _watch(module, guards, is_container=path in containers)
    except _NotPlain:
        return None
    return guards


def _require_own_methods(kind: type[nn.Module]) -> None:
    """Raise if a class has special methods, such as ``__call__``."""
    for base in kind.__mro__:
        if base is object or base.__module__.startswith("torch.nn."):
            continue
        for name, value in vars(base).items():
            is_special = name.startswith("__") and isinstance(value, FunctionType)
            if is_special and name not in ("__init__", "__repr__"):
                raise _NotPlain


def _watch(module: nn.Module, guards: Guards, *, is_container: bool) -> None:
    """Guard the hooks of a submodule; of one that every stage has, also the attributes."""
    for part in [module] if is_container else module.modules():
        for hooks in HOOKS:
            _watch_hooks(getattr(part, hooks), guards)
        if not is_container:
            if not type(part).__module__.startswith("torch.nn."):
                raise _NotPlain
            for key, value in vars(part).items():
                if is_constant(value):
                    guards.watch(vars(part), key)


def _watch_hooks(hooks: Sized, guards: Guards) -> None:
    if len(hooks):
        raise _NotPlain
    guards.watch_size(hooks)


class _Reader:
    """Reads the functions of a forward."""

    def __init__(self, containers: Sequence[nn.Module], guards: Guards) -> None:
        self._guards = guards
        self._containers = containers
        self._seen: set[FunctionType] = set()

    def read(self, function: object) -> None:
        """Guard the values that a function depends on; raise if it is not plain."""
        if not isinstance(function, FunctionType):
            raise _NotPlain
        if function in self._seen:
            return
        self._seen.add(function)
        names, attributes = _reads(function)
        for name in names:
            self._read_name(function.__globals__, name)
        for name in attributes:
            self._read_attribute(name)

    def _read_name(self, names: Mapping[str, Any], name: str) -> None:
        value = names.get(name, vars(builtins).get(name))
        if name in _LOOPS and value is vars(builtins)[name]:
            return
        if isinstance(value, FunctionType):
            self.read(value)
        elif not is_constant(value) and not any(value is module for module in _MODULES):
            raise _NotPlain
        if name not in names:
            raise _NotPlain
        self._guards.watch(names, name)

    def _read_attribute(self, name: str) -> None:
        is_known = name in _OPERATIONS or name in _CHILDREN
        for container in self._containers:
            tables = (container._modules, container._parameters, container._buffers)
            if name in vars(container):
                value = vars(container)[name]
                if is_constant(value):
                    self._guards.watch(vars(container), name)
                elif not isinstance(value, Placeholder):
                    raise _NotPlain
            elif not any(name in table for table in tables):
                value = getattr_static(type(container), name, None)
                if value is None or (name in _CHILDREN and type(container) in ROWS):
                    continue
                if getattr(value, "__module__", "").startswith("torch."):
                    raise _NotPlain
                self.read(value)
            is_known = True
        if not is_known:
            raise _NotPlain


def _reads(function: FunctionType) -> tuple[set[str], set[str]]:
    """The names of the globals and attributes that a function reads."""
    whole = function.__code__
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    has_any = whole.co_flags & (CO_VARARGS | CO_VARKEYWORDS)
    if has_any or whole.co_freevars or not all(map(is_constant, defaults)):
        raise _NotPlain
    names: set[str] = set()
    attributes: set[str] = set()
    before = ""
    for step in get_instructions(whole):
        code = step.opname
        if code not in (*_CODES, *_CONSTANTS) and not code.startswith(_FAMILIES):
            raise _NotPlain
        # Whether two arguments are the same object may differ each time.
        if code == "IS_OP" and before not in _CONSTANTS:
            raise _NotPlain
        if code == "LOAD_GLOBAL":
            names.add(step.argval)
        elif code in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
        before = code
    return names, attributes
