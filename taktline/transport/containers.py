"""Containers as plain data for messages.

Nothing that a message names is imported, looked up in a module or called. A name is compared with
the names of the types that this process knows by itself:

- the kinds of Python (tuple, list, dict …) and the result types of torch's operators;
- containers that code outside of torch has registered with pytree, as transformers does;
- named tuples that :func:`register_container` was called with, that are in an example of a stage's
  arguments or outputs, or that this process has sent.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

import torch

from taktline import pytree
from taktline.errors import SignatureError
from taktline.transport.plain import FACTORIES, NotPlainError, pack, unpack

_Class = TypeVar("_Class", bound="type[Any]")

_KINDS: dict[str, Any] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": defaultdict,
    "deque": deque,
}
_NAMED = "namedtuple"
_OF_TORCH = ("torch.return_types", "torch.fx.immutable_collections")
"""The modules of torch whose containers hold nothing but their items."""
_DEEPEST = 24
"""The deepest nesting of containers."""

_registered: dict[str, type] = {}


def register_container(cls: _Class) -> _Class:
    """Let a named tuple or a dataclass cross from one rank to another; call it on every rank.

    >>> from typing import NamedTuple
    >>> import taktline as tl
    >>> @tl.register_container
    ... class Hidden(NamedTuple):
    ...     states: torch.Tensor
    ...     mask: torch.Tensor
    """
    if not isinstance(cls, type) or not (_is_named(cls) or is_dataclass(cls) or _in_pytree(cls)):
        raise SignatureError(
            f"register_container takes a named tuple or a dataclass, not {cls!r}; register another "
            "container with torch.utils._pytree.register_pytree_node"
        )
    known: Any = cls
    if not _is_named(cls) and not _in_pytree(cls):
        pytree.register_dataclass(known)
    _registered[_name(cls)] = known
    return cls


def note_containers(spec: pytree.TreeSpec | None) -> None:
    """Register the named tuples in a tree."""
    if spec is None or spec.is_leaf():
        return
    if spec.type is namedtuple:
        _registered[_name(spec.context)] = spec.context
    for child in spec.children():
        note_containers(child)


def encode_tree(spec: pytree.TreeSpec) -> Any:
    """A tree as nested lists, for JSON: ``None`` for a leaf, else kind, context, children.

    >>> spec = pytree.tree_flatten({"a": 1, "b": (2, 3)})[1]
    >>> encode_tree(spec)
    ['dict', ['a', 'b'], [None, ['tuple', None, [None, None]]]]
    >>> decode_tree(encode_tree(spec)) == spec
    True
    """
    note_containers(spec)
    return _encode_node(spec, _DEEPEST)


def decode_tree(data: Any) -> pytree.TreeSpec:
    """The tree that such lists describe; a :class:`SignatureError` if they describe none."""
    return _decode_node(data, _DEEPEST)


def _encode_node(spec: pytree.TreeSpec, depth: int) -> Any:
    if spec.is_leaf():
        return None
    if not depth:
        raise SignatureError(f"containers are nested more than {_DEEPEST} deep; use flatter ones")
    if spec.type is namedtuple:
        kind, context = _NAMED, [_name(spec.context), len(spec.context._fields)]
    else:
        kind, context = _kind_of(spec.type), encode_plain(spec.context, spec.type)
    return [kind, context, [_encode_node(child, depth - 1) for child in spec.children()]]


def _kind_of(cls: Any) -> str:
    """The name of a type of container in messages."""
    if cls.__name__ in _KINDS and _KINDS[cls.__name__] is cls:
        return cls.__name__
    name = _name(cls)
    if _known().get(name) is not cls:
        raise SignatureError(
            f"{cls.__qualname__} of {cls.__module__} cannot be sent to another rank; pass its "
            "contents in a tuple or a dict"
        )
    return name


def _decode_node(data: Any, depth: int) -> pytree.TreeSpec:
    if data is None:
        return pytree.tree_structure(0)
    if not depth or not isinstance(data, list) or len(data) != 3 or not isinstance(data[2], list):
        raise SignatureError("a received container has a wrong description")
    kind, context, described = data
    children = [_decode_node(child, depth - 1) for child in described]
    if kind == _NAMED:
        return pytree.TreeSpec(namedtuple, _named_type(context, len(children)), children)
    if isinstance(kind, str) and kind in _KINDS:
        context = decode_plain(context)
        _check(kind, context, len(children))
        return pytree.TreeSpec(_KINDS[kind], context, children)
    cls = _known().get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise _unknown(kind)
    return pytree.TreeSpec(cls, decode_plain(context), children)


def _named_type(context: Any, children: int) -> Any:
    name, fields = context if isinstance(context, list) and len(context) == 2 else (None, None)
    found = _registered.get(name) if isinstance(name, str) else None
    if found is None or not _is_named(found):
        raise _unknown(name)
    if not len(found._fields) == fields == children:  # pyright: ignore[reportAttributeAccessIssue]
        raise SignatureError(
            f"a received {_words(name)} has other fields than here; run the same code on every rank"
        )
    return found


def _check(kind: str, context: Any, children: int) -> None:
    """Raise unless the context of one of Python's own containers is valid for it."""
    if kind in ("tuple", "list"):
        fits = context is None
    elif kind == "deque":
        # A bool is an int.
        fits = context is None or (type(context) is int and children <= context < sys.maxsize)
    else:
        keys = context
        if kind == "defaultdict":
            pair = isinstance(context, list) and len(context) == 2
            factory, keys = context if pair else (0, None)
            if factory is not None and factory not in FACTORIES.values():
                keys = None
        fits = isinstance(keys, list) and len(keys) == children and _are_keys(keys)
    if not fits:
        raise SignatureError(f"a received {kind} has a wrong description")


def _are_keys(keys: Sequence[Any]) -> bool:
    try:
        return len(set(keys)) == len(keys)
    except TypeError:  # one of them cannot be a key
        return False


def encode_plain(context: Any, owner: Any) -> Any:
    """A value without tensors, such as a container's keys, for JSON.

    >>> encode_plain([0.5, ("a", 1)], list)
    [0.5, {'$': 'tuple', 'of': ['a', 1]}]
    """
    try:
        return pack(context, "")
    except (NotPlainError, ValueError) as error:
        value = error.args[1] if isinstance(error, NotPlainError) else context
        raise SignatureError(
            f"{owner.__name__} with {value!r} cannot be sent to another rank; use keys and fields "
            "that are numbers and strings"
        ) from None


def decode_plain(data: Any) -> Any:
    """The value that was encoded; a :class:`SignatureError` if none was."""
    try:
        return unpack(data)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SignatureError("a received plain value has a wrong description") from None


def _known() -> dict[str, Any]:
    """All types that this process knows as containers, by name."""
    known: dict[str, Any] = {_name(cls): cls for cls in pytree.SUPPORTED_NODES if _is_harmless(cls)}
    return known | {name: cls for name, cls in _registered.items() if not _is_named(cls)}


def _is_harmless(cls: Any) -> bool:
    """Whether putting such a container together runs no code that a message could choose."""
    if cls is namedtuple or cls in _KINDS.values():
        return False  # these have kinds of their own
    module = cls.__module__
    return cls is torch.Size or module in _OF_TORCH or module.split(".")[0] != "torch"


def _in_pytree(cls: type) -> bool:
    return cls in pytree.SUPPORTED_NODES


def _is_named(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")


def _name(cls: Any) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _words(name: Any) -> str:
    return str(name)[:200].replace(":", ".")


def _unknown(name: Any) -> SignatureError:
    return SignatureError(
        f"this rank does not know the received container {_words(name)!r}; on every rank, call "
        "taktline.register_container with its class, or import the module that registers it"
    )
