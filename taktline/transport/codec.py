"""Values as JSON, for messages and checkpoints: plain values, containers, signatures.

JSON has no tuples, infinities or tensors. Each of them is written as an object with the key ``$``::

    (0.9, inf)   {"$": "tuple", "of": [0.9, {"$": "float", "of": "inf"}]}

Nothing that arrives is trusted: no name in it is imported, looked up in a module or called. A name
of a container is compared with the names of the types that this process knows by itself:

- the containers of Python (tuple, list, dict …) and the result types of torch's operators;
- containers that code outside of torch has registered with pytree, as transformers does;
- named tuples that :func:`register_container` was called with, that are in an example of a stage's
  arguments or outputs, or that this process has sent.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import astuple, is_dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch

from taktline import pytree
from taktline.checks import Either, conform, read
from taktline.errors import JsonError, SignatureError
from taktline.meta import DTYPES, Leaf, Sharding, Signature, TensorMeta, name_of

_Class = TypeVar("_Class", bound="type[Any]")

_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, int, float, str)}
"""The types that a value may be, such as what a defaultdict fills itself with."""
_ATOMS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (int, str, int),
    "float": (float, str, float),
    "str": (str, lambda text: list(map(ord, text)), lambda codes: "".join(map(chr, codes))),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "dtype": (torch.dtype, name_of, DTYPES.__getitem__),
    "type": (type, lambda cls: cls.__name__, _TYPES.__getitem__),
}
"""Values without others in them: how they are written where JSON cannot hold them, and read."""
_LISTS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "OrderedDict": OrderedDict,
}
_CONTAINERS: tuple[Any, ...] = (tuple, list, dict, OrderedDict, defaultdict, deque)
"""The containers of Python that pytree knows."""
_OF_TORCH = ("torch.return_types", "torch.fx.immutable_collections")
"""The modules of torch whose containers hold nothing but their items."""
_NOT_BY_NAME = ("torch", "builtins", "collections")
_DEEPEST = 24
"""The deepest nesting of containers."""
_LARGEST = 2**62
"""More bytes than any memory has."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which a text in UTF-8 cannot have."""

_SHARDING = ([str], [int], [str], [int], [int])
_TENSOR = {"dtype": str, "shape": [int], "grad": bool, "sharding": Either(None, _SHARDING)}
_WHAT = "a description of values"

_registered: dict[str, type] = {}


class NotPlainError(Exception):
    """A value cannot be written as JSON: where it is, and the value."""


def pack(value: Any, what: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """A value as JSON.

    Tensors go into ``tensors``, under names that begin with ``what``. Without it, only values that
    come back as they were can be packed.

    >>> pack({"betas": (0.9, 0.99), 7: None}, "state")["$"]
    'dict'
    >>> pack({"fn": print}, "scheduler")
    Traceback (most recent call last):
    taktline.transport.codec.NotPlainError: ('scheduler.fn', <built-in function print>)
    """
    if tensors is not None:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return _tagged("array", pack(torch.from_numpy(value.copy()), what, tensors))
        if isinstance(value, torch.Tensor):
            return _pack_tensor(value, what, tensors)
        value = _as_python(value)
    kind = type(value)
    if _is_json(value):
        return value
    for name, (cls, write, _) in _ATOMS.items():
        if kind is cls and (kind is not type or value in _TYPES.values()):
            return _tagged(name, write(value))
    # The order of a set differs from one process to the next.
    if kind in (list, tuple, deque) or (kind is set and tensors is not None):
        items = [pack(item, f"{what}[{n}]", tensors) for n, item in enumerate(value)]
        return items if kind is list else _tagged(kind.__name__, items)
    if kind in (dict, OrderedDict, Counter):
        pairs = {key: pack(item, f"{what}.{key}", tensors) for key, item in value.items()}
        if kind is dict and all(type(key) is str and key != "$" for key in pairs):
            return pairs
        rows = [[pack(key, what, tensors), item] for key, item in pairs.items()]
        return _tagged(kind.__name__, rows)
    raise NotPlainError(what, value)


def _is_json(value: Any) -> bool:
    """Whether JSON can hold a value, and nothing else is written like it."""
    if isinstance(value, str):
        return type(value) is str and not _SURROGATE.search(value)
    if type(value) in (int, float):
        return abs(value) < (_LARGEST if type(value) is int else math.inf)
    return value is None or value is True or value is False


def _tagged(kind: str, of: Any) -> dict[str, Any]:
    return {"$": kind, "of": of}


def _as_python(value: Any) -> Any:
    """A number of NumPy, or of a class of its own, and any mapping, as Python's own."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, Mapping) and type(value) not in (OrderedDict, Counter):
        return dict(value)
    return value


def _pack_tensor(value: torch.Tensor, what: str, tensors: dict[str, torch.Tensor]) -> Any:
    if not value.dim() and not value.is_complex():
        return _tagged("number", [name_of(value.dtype), pack(value.item(), what)])
    name = what if what not in tensors else f"{what}#{len(tensors)}"
    tensors[name] = value.detach()
    return _tagged("tensor", name)


def unpack(packed: Any, fetch: Callable[[str], torch.Tensor] | None = None) -> Any:
    """The value that was packed; ``fetch`` finds a tensor by its name, if there may be any.

    Raises a KeyError, a TypeError or a ValueError if it was not packed here.

    >>> tensors = {}
    >>> packed = pack([(1, float("inf")), torch.ones(2)], "x", tensors)
    >>> unpack(packed, tensors.__getitem__)
    [(1, inf), tensor([1., 1.])]
    """
    if isinstance(packed, list):
        return [unpack(each, fetch) for each in packed]
    if not isinstance(packed, dict):
        return packed
    if "$" not in packed:
        return {key: unpack(each, fetch) for key, each in packed.items()}
    kind, of = packed["$"], packed["of"]
    if fetch is not None and kind == "tensor":
        return fetch(of)
    if fetch is not None and kind == "array":
        return unpack(of, fetch).numpy()
    if fetch is not None and kind == "number":
        return torch.tensor(unpack(of[1]), dtype=DTYPES[of[0]])
    if kind in _ATOMS:
        return _ATOMS[kind][2](of)
    if kind in _LISTS:
        return _LISTS[kind]([unpack(each, fetch) for each in of])
    pairs = [(unpack(key, fetch), unpack(item, fetch)) for key, item in of]
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key comes twice")
    return _DICTS[kind](pairs)


def register_container(cls: _Class) -> _Class:
    """Let a named tuple or a dataclass cross from one rank to another; call it on every rank.

    >>> from typing import NamedTuple
    >>> import taktline as tl
    >>> @tl.register_container
    ... class Hidden(NamedTuple):
    ...     states: torch.Tensor
    ...     mask: torch.Tensor
    """
    is_class = isinstance(cls, type)
    if is_class and is_dataclass(cls) and cls not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(cls)
    if not is_class or not (_is_named(cls) or cls in pytree.SUPPORTED_NODES):
        raise SignatureError(
            f"register_container takes a named tuple or a dataclass, not {cls!r}; register another "
            "container with torch.utils._pytree.register_pytree_node"
        )
    _registered[_name(cls)] = cls
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
    ['builtins:dict', ['a', 'b'], [None, ['builtins:tuple', None, [None, None]]]]
    >>> decode_tree(encode_tree(spec)) == spec
    True
    """
    note_containers(spec)
    return _encode_node(spec, _kinds(), _DEEPEST)


def _encode_node(spec: pytree.TreeSpec, kinds: dict[str, Any], depth: int) -> Any:
    if spec.is_leaf():
        return None
    if not depth:
        raise SignatureError(f"containers are nested more than {_DEEPEST} deep; use flatter ones")
    is_named = spec.type is namedtuple
    cls, context = (spec.context, None) if is_named else (spec.type, spec.context)
    if kinds.get(_name(cls)) is not cls:
        raise SignatureError(
            f"{cls.__qualname__} of {cls.__module__} cannot be sent to another rank; pass its "
            "contents in a tuple or a dict"
        )
    try:
        packed = pack(context, "")
    except (NotPlainError, ValueError) as error:
        found = error.args[1] if isinstance(error, NotPlainError) else context
        raise SignatureError(
            f"{cls.__name__} with {found!r} cannot be sent to another rank; use keys and fields "
            "that are numbers and strings"
        ) from None
    return [_name(cls), packed, [_encode_node(each, kinds, depth - 1) for each in spec.children()]]


def decode_tree(data: Any) -> pytree.TreeSpec:
    """The tree that such lists describe; a :class:`SignatureError` if they describe none."""
    try:
        return _decode_node(data, _kinds(), _DEEPEST)
    except SignatureError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SignatureError("a received container has a wrong description") from None


def _decode_node(data: Any, kinds: dict[str, Any], depth: int) -> pytree.TreeSpec:
    if data is None:
        return pytree.tree_structure(0)
    kind, context, described = data
    if not depth or type(described) is not list:
        raise ValueError
    if kind not in kinds:
        raise SignatureError(
            f"this rank does not know the received container {_words(kind)!r}; on every rank, call "
            "taktline.register_container with its class, or import the module that registers it"
        )
    cls, context = kinds[kind], unpack(context)
    children = [_decode_node(child, kinds, depth - 1) for child in described]
    if cls in _CONTAINERS and not _fits(cls, context, len(children)):
        raise ValueError
    if not _is_named(cls):
        return pytree.TreeSpec(cls, context, children)
    if len(cls._fields) != len(children):
        raise SignatureError(
            f"a received {_words(kind)} has other fields than here; run the same code on every rank"
        )
    return pytree.TreeSpec(namedtuple, cls, children)


def _fits(cls: Any, context: Any, count: int) -> bool:
    """Whether a container of Python can be put together with this context, and has it then."""
    if cls is defaultdict and context[0] is not None and context[0] not in _TYPES.values():
        return False
    spec = pytree.TreeSpec(cls, context, [pytree.tree_structure(0)] * count)
    return pytree.tree_structure(pytree.tree_unflatten([0] * count, spec)) == spec


def _kinds() -> dict[str, Any]:
    """The containers that this process knows, by their names in a message."""
    nodes = {_name(cls): cls for cls in pytree.SUPPORTED_NODES if _is_harmless(cls)}
    return {**nodes, **_registered, **{_name(cls): cls for cls in _CONTAINERS}}


def _is_harmless(cls: Any) -> bool:
    """Whether putting such a container together runs no code that a message could choose."""
    module = cls.__module__
    return cls is torch.Size or module in _OF_TORCH or module.split(".")[0] not in _NOT_BY_NAME


def _is_named(cls: Any) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _name(cls: Any) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _words(name: Any) -> str:
    return str(name)[:200].replace(":", ".")


def encode(signature: Signature) -> bytes:
    """A signature as text.

    >>> signature = Signature.of([torch.zeros(2), None, 3])
    >>> decode(encode(signature)) == signature
    True
    """
    spec = None if signature.spec is None else encode_tree(signature.spec)
    return json.dumps([[_encode_leaf(leaf) for leaf in signature.leaves], spec]).encode()


def decode(text: bytes) -> Signature:
    """The signature that a text describes; raises a :class:`SignatureError` if it is none."""
    try:
        leaves, tree = read(text, ([object], object), what=_WHAT)
        found = tuple(map(_decode_leaf, leaves))
    except JsonError as error:
        raise SignatureError(str(error)) from None
    except SignatureError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SignatureError("a received plain value has a wrong description") from None
    signature = Signature(found, None if tree is None else decode_tree(tree))
    if signature.spec is not None and signature.spec.num_leaves != len(leaves):
        raise SignatureError(
            f"{_WHAT} has {len(leaves)} of them for a container of {signature.spec.num_leaves}"
        )
    return signature


def _encode_leaf(leaf: object) -> object:
    if isinstance(leaf, TensorMeta):
        return {
            "dtype": name_of(leaf.dtype),
            "shape": leaf.shape,
            "grad": leaf.requires_grad,
            "sharding": None if leaf.sharding is None else astuple(leaf.sharding),
        }
    if leaf is None or type(leaf) in (bool, int, float, str):
        return pack(leaf, "")
    raise SignatureError(
        f"{type(leaf).__name__} cannot be sent to another rank; tensors, None, numbers and strings "
        "can, and containers of them (for a dataclass or a named tuple of your own: "
        "taktline.register_container)"
    )


def _decode_leaf(leaf: Any) -> Leaf:
    if not isinstance(leaf, dict) or "$" in leaf:
        value = unpack(leaf)
        if value is not None and type(value) not in (bool, int, float, str):
            raise SignatureError("a received value is neither a tensor nor plain")
        return value
    conform(leaf, _TENSOR, what=_WHAT)
    dtype, shape = DTYPES.get(leaf["dtype"]), tuple(leaf["shape"])
    if dtype is None or not _is_size(shape, dtype.itemsize):
        raise SignatureError(f"no tensor is {str(leaf['dtype'])[:40]}{list(shape)[:8]}")
    if leaf["grad"] and not (dtype.is_floating_point or dtype.is_complex):
        raise SignatureError(f"a received tensor of {leaf['dtype']} requires a gradient")
    sharding = leaf["sharding"] and _decode_sharding(leaf["sharding"])
    return TensorMeta(shape, dtype, leaf["grad"], sharding)


def _decode_sharding(data: list[list[Any]]) -> Sharding:
    sharding = Sharding(*map(tuple, data))
    dims = len(sharding.sizes)
    if (
        len(sharding.placements) != dims
        or len(sharding.names) not in (0, dims)
        or len(sharding.stride) != len(sharding.shape)
        or not _is_size(sharding.shape, 16)
        or not all(0 <= step < _LARGEST for step in sharding.stride)
        or not all(0 < size < 2**31 for size in sharding.sizes)
    ):
        raise SignatureError("a received DTensor does not match the mesh in its description")
    return sharding


def _is_size(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether a tensor may have such a shape."""
    return len(shape) <= 64 and min(shape, default=0) >= 0 and prod(shape) * itemsize < _LARGEST
