"""How values travel: a boundary's tensors in one buffer, its description as text; no pickle.

::

    byte 0    status: 0, or 1 from a rank that has failed and has nothing to say
    byte 16   the first tensor, contiguous
    …         the next one, again at a multiple of 16
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_uint8
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch.utils import _pytree as pytree

from taktline.errors import SignatureError
from taktline.meta import Leaf, Signature, TensorMeta

__all__ = ["Layout", "Parcel", "decode", "encode"]

_ALIGNMENT = 16
_STATUS = 0
_FAILED = 1
_KEPT = 4
"""How many sent parcels are kept for the next messages of their layout."""
_CANNOT = (
    "cannot go from one rank to another; tensors, None, numbers and strings can, and tuples, lists "
    "and dicts of them"
)


@dataclass(slots=True, eq=False)
class Parcel:
    """A buffer to send, and the room for each tensor in it."""

    buffer: torch.Tensor
    views: list[torch.Tensor]
    failure: bool = False


@dataclass(slots=True, eq=False)
class Layout:
    """Where each tensor of a boundary lies in its buffer.

    >>> layout = Layout((TensorMeta((2,), torch.float32), TensorMeta((), torch.int64)))
    >>> parcel = layout.pack([torch.tensor([1.0, 2.0]), torch.tensor(3)])
    >>> layout.unpack(parcel.buffer)
    [tensor([1., 2.]), tensor(3)]
    """

    tensors: tuple[TensorMeta, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    nbytes: int = field(init=False)
    _places: list[tuple[TensorMeta, tuple[int, ...], int]] = field(init=False)
    _free: list[Parcel] = field(init=False, default_factory=list)
    _readable: bool = field(init=False)

    def __post_init__(self) -> None:
        offset = _ALIGNMENT
        self._places = []
        for tensor in self.tensors:
            self._places.append((tensor, _strides(tensor.shape), offset // tensor.dtype.itemsize))
            offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = offset
        self._readable = self.device.type == "cpu"

    def pack(self, tensors: Sequence[torch.Tensor | None]) -> Parcel:
        """The tensors in one buffer; a missing one becomes zeros."""
        parcel = self._free.pop() if self._free else self._parcel()
        for view, tensor in zip(parcel.views, tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach())
        return parcel

    def recycle(self, parcel: Parcel) -> None:
        """Take back a parcel that has been sent; a few are kept."""
        if len(self._free) < _KEPT and not parcel.failure:
            self._free.append(parcel)

    def failure(self) -> Parcel:
        """A message of the same size that says only that its sender has failed."""
        parcel = self._parcel()
        # Zeros, since a GPU computes with them before it learns of the failure: as indices, what
        # happens to lie in the memory could break it for good.
        parcel.buffer.zero_()
        parcel.buffer[_STATUS] = _FAILED
        parcel.failure = True
        return parcel

    def empty(self) -> torch.Tensor:
        """A buffer to receive into."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def failed(self, buffer: torch.Tensor) -> bool:
        """Whether what arrived comes from a rank that has failed.

        On a GPU nobody looks: that would wait for the device. The outcome of the step tells.
        """
        # Read where it lies: indexing the tensor takes longer than unpacking the rest.
        return self._readable and c_uint8.from_address(buffer.data_ptr()).value == _FAILED

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer, sharing its memory; leaves for autograd where it says so."""
        # By .data each one counts its own changes: views of one tensor count them together, and
        # then autograd would refuse a backward because a neighbour was changed in place.
        tensors = [
            buffer.data.view(tensor.dtype).as_strided(tensor.shape, strides, start)
            for tensor, strides, start in self._places
        ]
        for (meta, _, _), tensor in zip(self._places, tensors, strict=True):
            if meta.requires_grad:
                tensor.requires_grad_()
        return tensors

    def _parcel(self) -> Parcel:
        buffer = self.empty()
        buffer[:_ALIGNMENT] = 0
        return Parcel(buffer, [view.requires_grad_(False) for view in self.unpack(buffer)])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(
        reduce(lambda strides, size: (strides[0] * size, *strides), reversed(shape[1:]), (1,))
        if shape
        else ()
    )


def encode(signature: Signature) -> bytes:
    """A signature as text.

    >>> decode(encode(Signature.of([torch.zeros(2), None, 3]))) == Signature.of(
    ...     [torch.zeros(2), None, 3]
    ... )
    True
    """
    spec = None if signature.spec is None else _encode_tree(signature.spec)
    return json.dumps([[_encode_leaf(leaf) for leaf in signature.leaves], spec]).encode()


def decode(text: bytes) -> Signature:
    """The signature that a text describes."""
    leaves, spec = json.loads(text)
    return Signature(
        tuple(_decode_leaf(leaf) for leaf in leaves),
        None if spec is None else pytree.treespec_loads(spec),
    )


def _encode_tree(spec: pytree.TreeSpec) -> str:
    with suppress(NotImplementedError, TypeError):  # a type without a name, a key that is no JSON
        text = pytree.treespec_dumps(spec)
        if pytree.treespec_loads(text) == spec:
            return text
    raise SignatureError(f"{spec} {_CANNOT}")


def _encode_leaf(leaf: object) -> object:
    if isinstance(leaf, TensorMeta):
        return [str(leaf.dtype).removeprefix("torch."), leaf.shape, leaf.requires_grad]
    if leaf is None or type(leaf) in (bool, int, float, str):
        return leaf
    raise SignatureError(f"a {type(leaf).__name__} {_CANNOT}")


def _decode_leaf(leaf: object) -> Leaf:
    if isinstance(leaf, list):
        dtype, shape, requires_grad = leaf
        return TensorMeta(tuple(shape), getattr(torch, dtype), requires_grad)
    return leaf  # pyright: ignore[reportReturnType]
