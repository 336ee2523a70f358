"""Values of Python as JSON: keys of containers in messages, states of schedulers in checkpoints.

JSON has no tuples, infinities or tensors. Each of them is written as an object with the key ``$``::

    (0.9, inf)   {"$": "tuple", "of": [0.9, {"$": "float", "of": "inf"}]}

Nothing that a text names is imported, looked up in a module or called.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from taktline.meta import DTYPES, name_of

FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, int, float, str)}
"""The types that a value may be, such as what a defaultdict fills itself with."""
_LISTS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "OrderedDict": OrderedDict,
}
_LARGEST = 2**62
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which a text in UTF-8 cannot have."""


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
    taktline.transport.plain.NotPlainError: ('scheduler.fn', <built-in function print>)
    """
    if tensors is not None:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return _tagged("array", pack(torch.from_numpy(value.copy()), what, tensors))
        if isinstance(value, torch.Tensor):
            return _pack_tensor(value, what, tensors)
        value = _as_python(value)
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if abs(value) < _LARGEST else _tagged("int", str(value))
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", str(value))
    if kind is str:
        return _tagged("str", list(map(ord, value))) if _SURROGATE.search(value) else value
    if kind is bytes:
        return _tagged("bytes", value.hex())
    if kind is torch.dtype:
        return _tagged("dtype", name_of(value))
    if kind is type and FACTORIES.get(value.__name__) is value:
        return _tagged("type", value.__name__)
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
    if kind in ("int", "float"):
        return FACTORIES[kind](of)
    if kind == "str":
        return "".join(map(chr, of))
    if kind == "bytes":
        return bytes.fromhex(of)
    if kind == "dtype":
        return DTYPES[of]
    if kind == "type":
        return FACTORIES[of]
    if kind in _LISTS:
        return _LISTS[kind]([unpack(each, fetch) for each in of])
    pairs = [(unpack(key, fetch), unpack(item, fetch)) for key, item in of]
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key comes twice")
    return _DICTS[kind](pairs)
