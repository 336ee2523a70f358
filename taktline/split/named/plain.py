"""Forwards that are plain: which submodules they call, and with what, is always the same.

A plain forward has assignments, conditions, loops over its submodules, and arithmetic. What it
calls is as plain as itself, or a function of torch that looks at no data. Attributes and globals
are numbers and the like, which are watched::

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

So what one call has shown holds for all that look alike, if a walk has seen that the forward asks
no tensor for a number, as in a condition, and draws no random ones.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Container, Iterator, Mapping, Sequence, Sized
from dis import get_instructions
from inspect import getattr_static, getsource
from textwrap import dedent
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from taktline.split.named.changes import HOOKS
from taktline.split.named.mutable import is_constant
from taktline.split.named.placeholder import Placeholder

__all__ = ["Guards", "guards_of"]


class Guards:
    """What must stay as it is for a plain forward to call the same."""

    __slots__ = ("_parts", "_sizes", "_values")

    def __init__(self) -> None:
        self._values: list[tuple[Mapping[str, Any], str, Any]] = []
        self._parts: list[Sized] = []
        self._sizes: list[int] = []

    def watch(self, values: Mapping[str, Any], name: str) -> None:
        """Keep a value, by its name among others."""
        self._values.append((values, name, values[name]))

    def watch_size(self, parts: Sized) -> None:
        """Keep the number of parts, such as hooks."""
        self._parts.append(parts)
        self._sizes.append(len(parts))

    def hold(self) -> bool:
        """Whether all is as it was."""
        for values, name, value in self._values:
            found = values.get(name)
            if found is not value and (type(found) is not type(value) or found != value):
                return False
        return list(map(len, self._parts)) == self._sizes


_NODES = (
    *(ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr),
    *(ast.For, ast.If, ast.Return, ast.Name, ast.Constant, ast.Tuple, ast.Attribute, ast.Call),
    *(ast.keyword, ast.Subscript, ast.Slice, ast.IfExp, ast.BoolOp, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context),
)
_MODULES = (torch, nn.functional)
_LOOPS = ("range", "enumerate", "zip", "reversed", "len")
_OPERATIONS = (
    *("arange", "cat", "contiguous", "device", "dim", "dropout", "dtype", "expand", "flatten"),
    *("gelu", "mean", "ndim", "numel", "ones", "permute", "relu", "reshape", "shape", "size"),
    *("softmax", "sqrt", "squeeze", "stack", "sum", "tanh", "transpose", "unsqueeze", "view"),
    "zeros",
)
"""Functions and attributes of torch that look at no data, and change nothing but generators."""
_CHILDREN = ("children", "items", "keys", "named_children", "values")
_ROWS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _NotPlain(Exception):
    """Something else may happen in another call."""


def guards_of(
    kind: type[nn.Module],
    containers: Mapping[str, nn.Module],
    units: Container[str],
    hooked: Sequence[str],
) -> Guards | None:
    """The guards of a plain forward; None if it is not plain.

    Args:
        kind: the model's class.
        containers: of a piece of the model, by their names; they have the submodules.
        units: the names of those submodules that belong to one stage; others run in all.
        hooked: those of them that have hooks in other stages than their own.
    """
    guards = Guards()
    reader = _Reader(list(containers.values()), guards)
    try:
        _watch_hooks(hooked, guards)
        for hooks in HOOKS:
            _watch_hooks(getattr(nn.modules.module, f"_global{hooks}"), guards)
        for name, container in containers.items():
            owner = type(container) if name else kind
            if owner not in _ROWS:
                _require_own_methods(owner)
                reader.read(owner.forward)
            guards.watch_size(container._modules)
            for key, module in container._modules.items():
                path = f"{name}.{key}" if name else key
                if module is not None and path not in units:
                    guards.watch(container._modules, key)
                    _watch(module, guards, is_container=path in containers)
    except _NotPlain:
        return None
    return guards


def _require_own_methods(kind: type[nn.Module]) -> None:
    """Raise if objects of a class may do something else when they are called, or looked into."""
    for base in kind.__mro__:
        if base is object or base.__module__.startswith("torch.nn."):
            continue
        for name, value in vars(base).items():
            is_special = name.startswith("__") and isinstance(value, FunctionType)
            if is_special and name not in ("__init__", "__repr__"):
                raise _NotPlain


def _watch(module: nn.Module, guards: Guards, *, is_container: bool) -> None:
    """Watch the hooks of a submodule; and all of one that every stage has."""
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
    """Reads functions of a forward, and what they read."""

    def __init__(self, containers: Sequence[nn.Module], guards: Guards) -> None:
        self._guards = guards
        self._containers = containers
        self._seen: set[FunctionType] = set()

    def read(self, function: object) -> None:
        """Take note of what a function depends on; raise if it is not plain."""
        if not isinstance(function, FunctionType) or function.__code__.co_freevars:
            raise _NotPlain
        if function in self._seen:
            return
        self._seen.add(function)
        names, attributes = _reads(_definition(function))
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
                if value is None or (name in _CHILDREN and type(container) in _ROWS):
                    continue
                if getattr(value, "__module__", "").startswith("torch."):
                    raise _NotPlain
                self.read(value)
            is_known = True
        if not is_known:
            raise _NotPlain


def _definition(function: FunctionType) -> ast.AST:
    """The text of a function, if it is that of its code."""
    try:
        parsed = ast.parse(dedent(getsource(function.__code__)))
    except (OSError, SyntaxError) as error:
        raise _NotPlain from error
    compiled = compile(parsed, "", "exec", dont_inherit=True)
    codes = [part for part in compiled.co_consts if isinstance(part, CodeType)]
    if _operations(function.__code__) not in map(_operations, codes):
        raise _NotPlain  # written anew since it was loaded, or part of something else
    return parsed.body[0]


def _operations(code: CodeType) -> list[Any]:
    """What code does; how it calls methods depends on where it was compiled."""
    names = (each.opname.replace("METHOD", "ATTR") for each in get_instructions(code))
    return [code.co_names, *(name for name in names if name not in ("PRECALL", "PUSH_NULL"))]


def _reads(definition: ast.AST) -> tuple[set[str], set[str]]:
    """The names that are not a function's own, and the attributes, that it reads."""
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        raise _NotPlain
    own: set[str] = set()
    names: set[str] = set()
    attributes: set[str] = set()
    for node in _nodes(definition):
        match node:
            case ast.FunctionDef() if node is not definition:
                raise _NotPlain
            case ast.arguments(vararg=several, kwarg=named) if several or named:
                raise _NotPlain
            case ast.arg(arg=name):
                own.add(name)
            case ast.Name(id=name, ctx=context):
                (names if isinstance(context, ast.Load) else own).add(name)
            case ast.Attribute(attr=name, ctx=ast.Load()):
                attributes.add(name)
            case ast.Attribute() | ast.In() | ast.NotIn():
                raise _NotPlain
            case ast.Subscript(ctx=context) if not isinstance(context, ast.Load):
                raise _NotPlain
            case ast.Compare(ops=ops, comparators=others) if _is_identity(ops):
                # Which of two arguments is the same object may differ each time.
                if not all(isinstance(each, ast.Constant) for each in others):
                    raise _NotPlain
            case _ if not isinstance(node, _NODES):
                raise _NotPlain
    return names - own, attributes


def _is_identity(ops: Sequence[ast.cmpop]) -> bool:
    return any(isinstance(each, (ast.Is, ast.IsNot)) for each in ops)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all in it, but for types, which are for readers."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    yield from _nodes(part)
