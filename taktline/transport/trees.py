"""Trees of containers as plain data: types by their names, so that nothing is unpickled."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree

from taktline.errors import SignatureError

__all__ = ["decode_tree", "encode_tree"]


def encode_tree(spec: pytree.TreeSpec) -> Any:
    """A tree as nested lists, for JSON: ``None`` for a leaf, else type, context, children.

    >>> spec = pytree.tree_flatten({"a": 1, "b": (2, 3)})[1]
    >>> encode_tree(spec)[0]
    'builtins:dict'
    >>> decode_tree(encode_tree(spec)) == spec
    True
    """
    if spec.is_leaf():
        return None
    return [
        _name(spec.type),
        _encode(spec.context, spec.type),
        [encode_tree(child) for child in spec.children()],
    ]


def decode_tree(data: Any) -> pytree.TreeSpec:
    """The tree that such lists describe."""
    if data is None:
        return pytree.tree_structure(0)
    name, context, children = data
    kind = _find(name)
    if kind not in pytree.SUPPORTED_NODES:
        raise SignatureError(
            f"{_words(name)} has arrived, which is no container here; register it with pytree on "
            "every rank"
        )
    return pytree.TreeSpec(kind, _decode(context), [decode_tree(child) for child in children])


def _encode(context: Any, owner: Any) -> Any:
    """What a container knows of itself, such as its keys; lists begin with what they stand for."""
    if context is None or type(context) in (bool, int, float, str):
        return context
    if type(context) in (tuple, list):
        return [type(context).__name__, *(_encode(item, owner) for item in context)]
    if type(context) is dict:
        return ["dict", *([_encode(k, owner), _encode(v, owner)] for k, v in context.items())]
    if isinstance(context, torch.dtype):
        return ["dtype", str(context).removeprefix("torch.")]
    if isinstance(context, type):
        return ["type", _name(context)]
    raise SignatureError(
        f"a {owner.__name__} with {context!r} cannot go from one rank to another; let it have keys "
        "and fields that are numbers and strings"
    )


def _decode(data: Any) -> Any:
    if not isinstance(data, list):
        return data
    kind, *items = data
    match kind:
        case "tuple":
            return tuple(_decode(item) for item in items)
        case "list":
            return [_decode(item) for item in items]
        case "dict":
            return {_decode(key): _decode(value) for key, value in items}
        case "dtype":
            return getattr(torch, items[0])
        case _:
            found = _find(items[0])
            if not isinstance(found, type):
                raise SignatureError(f"{_words(items[0])} has arrived, which is no class here")
            return found


def _name(kind: Any) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _found(name) is not kind:
        raise SignatureError(
            f"a {kind.__qualname__} cannot go from one rank to another, since {kind.__module__} "
            "has no such name to find it by; define the class at the top of a module"
        )
    return name


def _find(name: str) -> Any:
    found = _found(name)
    if found is None:
        raise SignatureError(
            f"{_words(name)} has arrived, which is not known here; import its module on every rank"
        )
    return found


def _words(name: str) -> str:
    return name.replace(":", ".")


def _found(name: str) -> Any:
    """What is already imported under a name; importing for others' sake would run their code."""
    module, path = name.split(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
