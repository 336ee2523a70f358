"""Forwards that are plain: which submodules they call, and with what, is always the same.

A plain forward has assignments, loops over its submodules, and arithmetic. The functions it calls
are as plain as itself, or some of torch that look at no data. Attributes and globals are numbers
and the like, which are watched, and conditions depend on these and on shapes alone, or on whether
something is None::

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

So what one call has shown holds for all that look alike.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Container, Mapping, Sequence, Sized
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
    *(ast.arguments, ast.arg, ast.Assign, ast.AugAssign, ast.For, ast.Return, ast.Expr),
    *(ast.Name, ast.Constant, ast.Tuple, ast.Attribute, ast.Call, ast.keyword, ast.Subscript),
    *(ast.Slice, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context),
)
_MODULES = (torch, nn.functional)
_LOOPS = ("range", "enumerate", "zip", "reversed", "len")
_OPERATIONS = (
    *("arange", "cat", "contiguous", "device", "dim", "dropout", "dtype", "expand", "flatten"),
    *(
        "gelu",
        "mean",
        "ndim",
        "numel",
        "ones",
        "permute",
        "relu",
        "reshape",
        "shape",
        "size",
        "softmax",
    ),
    *("sqrt", "squeeze", "stack", "sum", "tanh", "transpose", "unsqueeze", "view", "zeros"),
)
"""Functions and attributes of torch that look at no data, and change nothing but generators."""
_LOOKS = ("device", "dtype", "ndim", "shape")
_SIZES = ("dim", "numel", "size")
"""What is the same for all tensors that look alike."""
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
        text = _Text(_definition(function))
        for name in text.names:
            self._read_name(function.__globals__, name)
        for name in text.attributes:
            self._read_attribute(name, name in text.conditions)

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

    def _read_attribute(self, name: str, is_condition: bool) -> None:
        is_known = name in _OPERATIONS or name in _CHILDREN
        for container in self._containers:
            tables = (container._modules, container._parameters, container._buffers)
            if name in vars(container):
                value = vars(container)[name]
                if is_constant(value):
                    self._guards.watch(vars(container), name)
                elif is_condition or not isinstance(value, Placeholder):
                    raise _NotPlain
            elif any(name in table for table in tables):
                if is_condition:
                    raise _NotPlain
            else:
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


class _Text(ast.NodeVisitor):
    """What a function reads: attributes, also as conditions, and names that are not its own."""

    def __init__(self, definition: ast.AST) -> None:
        if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
            raise _NotPlain
        self.attributes: set[str] = set()
        self.conditions: set[str] = set()
        self.names: set[str] = set()
        self._decisive: set[str] = set()
        """Names that conditions depend on."""
        self._own: set[str] = set()
        self._counters: set[str] = set()
        arguments = definition.args
        if arguments.vararg or arguments.kwarg:
            raise _NotPlain
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self._own.add(argument.arg)
        for part in (*arguments.defaults, *filter(None, arguments.kw_defaults), *definition.body):
            self.visit(part)
        if self._decisive & self._own:
            raise _NotPlain
        self.names -= self._own

    def generic_visit(self, node: ast.AST) -> None:
        """Go on, in what is plain."""
        if not isinstance(node, _NODES):
            raise _NotPlain
        super().generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """An assignment; its type is for readers."""
        for part in filter(None, (node.target, node.value)):
            self.visit(part)

    def visit_If(self, node: ast.If) -> None:
        """A condition that depends on no data."""
        self._read_condition(node.test)
        for part in (*node.body, *node.orelse):
            self.visit(part)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """One of two values."""
        self._read_condition(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def _read_condition(self, node: ast.expr) -> None:
        """Take note of what a condition, or a number in it, depends on: shapes and attributes."""
        match node:
            case ast.Constant():
                return
            case ast.Name(id=name):
                self._decisive.add(name)
                self.visit(node)
            case ast.UnaryOp(operand=operand):
                self._read_condition(operand)
            case ast.BoolOp(values=values):
                self._read_all(values)
            case ast.BinOp(left=left, right=right):
                self._read_all([left, right])
            case ast.Attribute(attr=name):
                # Of a tensor, what depends on no data; else what an attribute of the model is.
                if name not in _LOOKS:
                    self.conditions.add(name)
                self.visit(node)
            case ast.Subscript(value=ast.Attribute(attr=name), slice=part) if name in _LOOKS:
                self._read_condition(part)
                self.visit(node.value)
            case ast.Call(func=ast.Attribute(attr=name), args=args, keywords=[]) if name in _SIZES:
                self._read_all(args)
                self.visit(node)
            case ast.Compare(left=left, ops=ops, comparators=others):
                if all(isinstance(each, (ast.Is, ast.IsNot)) for each in ops):
                    if not all(isinstance(each, ast.Constant) for each in others):
                        raise _NotPlain
                    self.visit(left)
                else:
                    self._read_all([left, *others])
            case _:
                raise _NotPlain

    def _read_all(self, nodes: Sequence[ast.expr]) -> None:
        for node in nodes:
            self._read_condition(node)

    def visit_For(self, node: ast.For) -> None:
        """A loop, which may count."""
        called = node.iter.func if isinstance(node.iter, ast.Call) else None
        name = called.id if isinstance(called, ast.Name) else ""
        target = node.target
        if name == "enumerate" and isinstance(target, ast.Tuple):
            target = target.elts[0]
        if name in ("enumerate", "range") and isinstance(target, ast.Name):
            self._counters.add(target.id)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> None:
        """An assignment, which must not be to what a loop counts."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        named = {
            part.id for each in targets for part in ast.walk(each) if isinstance(part, ast.Name)
        }
        if named & self._counters:
            raise _NotPlain
        self.generic_visit(node)

    visit_AugAssign = visit_Assign

    def visit_Name(self, node: ast.Name) -> None:
        """A name that is read or given a value."""
        (self.names if isinstance(node.ctx, ast.Load) else self._own).add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """An attribute, which must not be given a value."""
        if not isinstance(node.ctx, ast.Load):
            raise _NotPlain
        self.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """An element in a place that depends on no data."""
        if not isinstance(node.ctx, ast.Load) or not self._is_fixed(node.slice):
            raise _NotPlain
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """A call; how often a loop runs depends on no data."""
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            for part in node.args:
                is_length = isinstance(part, ast.Call) and ast.unparse(part.func) == "len"
                if not is_length and not self._is_fixed(part):
                    raise _NotPlain
        self.generic_visit(node)

    def _is_fixed(self, node: ast.AST | None) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._counters
        if isinstance(node, ast.Tuple):
            return all(map(self._is_fixed, node.elts))
        if isinstance(node, ast.Slice):
            return all(map(self._is_fixed, (node.lower, node.upper, node.step)))
        if isinstance(node, ast.UnaryOp):
            return self._is_fixed(node.operand)
        return node is None or isinstance(node, ast.Constant)
