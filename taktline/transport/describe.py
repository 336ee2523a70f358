"""Signatures as JSON: written and read without pickle, and checked when read."""

from __future__ import annotations

import json
from dataclasses import astuple
from math import prod
from typing import Any

from taktline.checks import Either, conform, read
from taktline.errors import JsonError, SignatureError
from taktline.meta import DTYPES, Leaf, Signature, TensorMeta, name_of
from taktline.sharding import Sharding
from taktline.transport.containers import decode_plain, decode_tree, encode_plain, encode_tree

_LARGEST = 2**62
"""More bytes than any memory has."""
_SHARDING = ([str], [int], [([int], [int])], [str], [int], [int])
_TENSOR = {"dtype": str, "shape": [int], "grad": bool, "sharding": Either(None, _SHARDING)}
_WHAT = "a description of values"


def encode(signature: Signature) -> bytes:
    """A signature as text.

    >>> import torch
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
        return encode_plain(leaf, type(leaf))
    raise SignatureError(
        f"{type(leaf).__name__} cannot be sent to another rank; tensors, None, numbers and strings "
        "can, and containers of them (for a dataclass or a named tuple of your own: "
        "taktline.register_container)"
    )


def _decode_leaf(leaf: Any) -> Leaf:
    if not isinstance(leaf, dict) or "$" in leaf:
        value = decode_plain(leaf)
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


def _decode_sharding(data: list[Any]) -> Sharding:
    sharding = Sharding(*map(_tuples, data))
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


def _tuples(value: Any) -> Any:
    """JSON knows lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
