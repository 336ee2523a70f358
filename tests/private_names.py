"""The private names of torch that the package leans on, found in its source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

import taktline

ROOT = Path(taktline.__file__).parent
_PYTHON = frozenset(["_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace"])
"""Python's own, which are documented, or as old as Python."""
_OF_TORCH = frozenset(dir(torch.Tensor)) | frozenset(vars(torch.nn.Module()))
_LOOKUPS = ("getattr", "hasattr", "setattr", "delattr")


@cache
def used() -> dict[str, set[str]]:
    """Each name, and the rooms that use it.

    What is imported has its whole path. Of an object's attribute only the name is known, as in
    ``._version``. The shim for ``torch.distributed.pipelining`` has torch's names itself: there,
    only what it imports counts.
    """
    files = {
        path: list(ast.walk(ast.parse(path.read_text("utf-8")))) for path in ROOT.rglob("*.py")
    }
    own = {name for nodes in files.values() for name in _defined(nodes)}
    found: dict[str, set[str]] = {}
    for path, nodes in files.items():
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        names = set(_imported(nodes))
        if room != "compat":
            imported = {part for name in names for part in name.split(".")}
            looked_up = _attributes(nodes, own, imported)
            names |= {f".{name}" for name in looked_up if _is_private(name)}
        for name in names:
            found.setdefault(name, set()).add(room)
    return found


def imported_directly() -> dict[str, set[str]]:
    """Each name that is written out or imported, not looked up, and the files that do so."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        tree = _Runtime().visit(ast.parse(path.read_text("utf-8")))
        for name in _imported(list(ast.walk(tree)), look_up=False):
            found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


class _Runtime(ast.NodeTransformer):
    """Leaves out what only a type checker reads."""

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
        return node


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names that are defined here: functions, classes, variables and fields."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def _imported(nodes: Sequence[ast.AST], *, look_up: bool = True) -> Iterator[str]:
    """What comes from a private module of torch, or is private in a public one."""
    modules: dict[str, str] = {}
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str() as module, names=names) if _in_torch(module):
                modules |= {name.asname or name.name: f"{module}.{name.name}" for name in names}
            case ast.Import(names=names):
                for name in names:
                    if _in_torch(name.name):
                        modules[name.asname or "torch"] = name.name if name.asname else "torch"
    used = set(modules.values())
    used |= {
        ".".join([modules[path[0]], *path[1:]])
        for node in nodes
        if (path := _path(node)) and path[0] in modules
    }
    used |= set(_looked_up(nodes) if look_up else ())
    found = {_shortened(name) for name in used if any(map(_is_private, name.split(".")))}
    yield from (name for name in found if not any(other.startswith(f"{name}.") for other in found))


def _looked_up(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What is asked for by :mod:`taktline.private`."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id="private" | "for_all"), args=[ast.Constant(name), *_]):
                yield str(name)


def _shortened(name: str) -> str:
    """Up to the last private part, or what is taken from it if that is a module."""
    parts = name.split(".")
    last = max(place for place, part in enumerate(parts) if _is_private(part))
    return ".".join(parts[: last + 1 + _is_module(".".join(parts[: last + 1]))])


def _is_module(name: str) -> bool:
    try:
        return name in sys.modules or find_spec(name) is not None
    except ImportError:
        return False


def _attributes(nodes: Sequence[ast.AST], own: set[str], imported: set[str]) -> Iterator[str]:
    """Attributes of others, written out or looked up."""
    ours = own - _OF_TORCH | imported | _PYTHON
    theirs = _OF_TORCH - own
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in own:
                pass
            case ast.Attribute(attr=name) if name not in ours:
                yield name
            case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=name), *_]):
                if function in _LOOKUPS and isinstance(name, str) and name not in ours:
                    yield name
            case ast.Constant(value=str() as name) if name in theirs:
                yield name


def _in_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _path(node: ast.AST) -> list[str]:
    """``a.b.c`` as its parts; nothing for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) and parts else []
