"""The private names of torch that the package leans on, found in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

import taktline

ROOT = Path(taktline.__file__).parent
_PYTHON = frozenset(["_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace"])
"""Python's own, which are documented, or as old as Python."""
_OF_TORCH = frozenset(dir(torch.Tensor)) | frozenset(vars(torch.nn.Module()))
_LOOKUPS = ("getattr", "hasattr", "setattr", "delattr")


@cache
def _nodes() -> dict[str, list[ast.AST]]:
    """What the files consist of."""
    return {
        str(path.relative_to(ROOT)): list(ast.walk(ast.parse(path.read_text("utf-8"))))
        for path in ROOT.rglob("*.py")
    }


def names() -> set[str]:
    """All that :mod:`taktline.private` is asked for, and what is imported."""
    found = {name for nodes in _nodes().values() for name in _imported(nodes)}
    for nodes in _nodes().values():
        for node in nodes:
            match node:
                case ast.Call(
                    func=ast.Name(id="private" | "for_all"), args=[ast.Constant(str(name)), *_]
                ):
                    found.add(name)
    return found


def written() -> set[tuple[str, str]]:
    """Files, and the private names of torch that they import, not only for a type checker."""
    found: set[tuple[str, str]] = set()
    for file, nodes in _nodes().items():
        for_types = {
            inner
            for node in nodes
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        found |= {(file, name) for name in _imported([n for n in nodes if n not in for_types])}
    return found


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    """Private names of torch that are imported, or reached from what is."""
    known, used = {"torch": "torch"}, [_path(node) for node in nodes]
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module), names=names) if _in_torch(module):
                known |= {name.asname or name.name: f"{module}.{name.name}" for name in names}
            case ast.Import(names=names):
                known |= {n.asname: n.name for n in names if n.asname and _in_torch(n.name)}
    whole = {".".join([known[path[0]], *path[1:]]) for path in used if path and path[0] in known}
    yield from (n for n in {*known.values(), *whole} if any(map(_is_private, n.split("."))))


def attributes() -> set[str]:
    """The private attributes of objects that are not the package's own, each with a dot.

    The shim for ``torch.distributed.pipelining`` has torch's names itself, and is left out.
    """
    own = {name for nodes in _nodes().values() for name in _defined(nodes)}
    looked = {part for name in names() for part in name.split(".")}
    ours = own - _OF_TORCH | looked | _PYTHON
    found: set[str] = set()
    for file, nodes in _nodes().items():
        for node in nodes if not file.startswith("compat/") else ():
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in own:
                    continue
                case ast.Attribute(attr=name):
                    pass
                case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(str(name)), *_]):
                    if function not in _LOOKUPS:
                        continue
                case ast.Constant(value=str(name)) if name in _OF_TORCH - own:
                    pass
                case _:
                    continue
            if _is_private(name) and name not in ours:
                found.add(f".{name}")
    return found


def _defined(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that are defined here: functions, classes, variables and fields."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def _path(node: ast.AST) -> list[str]:
    """``a.b.c`` as its parts; nothing for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) and parts else []


def _in_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
