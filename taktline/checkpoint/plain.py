"""Values of Python as JSON and tensors: what a scheduler, a loader or a user may keep in a state.

JSON has no tuples, infinities or tensors. Each of them is written as an object with the key ``$``::

    (0.9, inf)   {"$": "tuple", "of": [0.9, {"$": "float", "of": "inf"}]}
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from taktline.checks import shown
from taktline.errors import CheckpointError
from taktline.meta import DTYPES, name_of

__all__ = ["pack", "unpack"]

_LISTS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "OrderedDict": OrderedDict,
}


def pack(value: Any, what: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON; its tensors go into ``tensors``, under names that begin with ``what``.

    >>> pack({"betas": (0.9, 0.99), 7: None}, "state", {})["$"]
    'dict'
    >>> pack({"fn": print}, "scheduler", {})
    Traceback (most recent call last):
    taktline.errors.CheckpointError: scheduler.fn is <built-in function print>, which cannot ...
    """
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value) if abs(int(value)) < 2**62 else _tagged("int", str(int(value)))
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else _tagged("float", str(float(value)))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return _tagged("array", pack(torch.from_numpy(value.copy()), what, tensors))
    if isinstance(value, torch.Tensor):
        if not value.dim() and not value.is_complex():
            number = pack(value.item(), what, tensors)
            return _tagged("number", [name_of(value.dtype), number])
        name = what if what not in tensors else f"{what}#{len(tensors)}"
        tensors[name] = value.detach()
        return _tagged("tensor", name)
    if isinstance(value, bytes):
        return _tagged("bytes", value.hex())
    if type(value) is list:
        return [pack(each, f"{what}[{n}]", tensors) for n, each in enumerate(value)]
    kind = type(value).__name__
    if kind in _LISTS and isinstance(value, (tuple, set, deque)):
        return _tagged(kind, [pack(v, f"{what}[{n}]", tensors) for n, v in enumerate(value)])
    if isinstance(value, Mapping):
        pairs = {key: pack(item, f"{what}.{key}", tensors) for key, item in value.items()}
        if type(value) is dict and all(type(key) is str and key != "$" for key in pairs):
            return pairs
        rows = [[pack(key, what, tensors), item] for key, item in pairs.items()]
        return _tagged(kind if kind in _DICTS else "dict", rows)
    raise CheckpointError(
        f"{what} is {shown(value)}, which cannot be saved without pickle; let its state have "
        "numbers, texts, tensors, and lists or dicts of these"
    )


def _tagged(kind: str, of: Any) -> dict[str, Any]:
    return {"$": kind, "of": of}


def unpack(packed: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """The value of what was packed; ``fetch`` finds a tensor by its name.

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
    kind, of = packed.get("$"), packed.get("of")
    try:
        return _unpack(str(kind), of, fetch)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{json.dumps(packed)[:80]} is not what was packed") from error


def _unpack(kind: str, of: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    if kind == "tensor":
        return fetch(of)
    if kind == "array":
        return unpack(of, fetch).numpy()
    if kind == "number":
        return torch.tensor(unpack(of[1], fetch), dtype=DTYPES[of[0]])
    if kind in ("int", "float"):
        return int(of) if kind == "int" else float(of)
    if kind == "bytes":
        return bytes.fromhex(of)
    if kind in _LISTS:
        return _LISTS[kind](unpack(of, fetch))
    return _DICTS[kind]([(unpack(key, fetch), unpack(item, fetch)) for key, item in of])
