"""How values travel: a boundary's tensors in one buffer.

::

    byte 0    status: 0, or 1 from a rank that has failed
    byte 1    one for each tensor: 1 if there is none (a gradient that nothing contributes to)
    byte 16   the first tensor, contiguous; further back if there are more than 15
    …         the next one, again at a multiple of 16

On a GPU these first bytes are left out, as reading them would wait; a single tensor is its own
buffer there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import string_at
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import torch

from taktline.meta import TensorMeta
from taktline.sharding import Sharding, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Layout", "Parcel"]

_CPU = torch.device("cpu")
_ALIGNMENT = 16
_STATUS = 0
_FAILED = 1
_KEPT = 4
"""How many sent parcels are kept for the next messages of their layout."""


@dataclass(slots=True, eq=False)
class Parcel:
    """A buffer to send, and the room for each tensor in it."""

    buffer: torch.Tensor
    views: list[torch.Tensor]
    reusable: bool = True


class Layout:
    """Where each tensor of a boundary lies in its buffer.

    >>> layout = Layout((TensorMeta((2,), torch.float32), TensorMeta((), torch.int64)))
    >>> parcel = layout.pack([torch.tensor([1.0, 2.0]), torch.tensor(3)])
    >>> layout.unpack(parcel.buffer)
    [tensor([1., 2.]), tensor(3)]
    """

    def __init__(
        self,
        tensors: tuple[TensorMeta, ...],
        device: torch.device = _CPU,
        mesh_for: Callable[[Sharding], DeviceMesh] | None = None,
    ) -> None:
        """``mesh_for`` finds this rank's mesh for a tensor that arrives in shards."""
        self.tensors, self.device, self._mesh_for = tensors, device, mesh_for
        self._free: list[Parcel] = []
        self._readable = device.type == "cpu"
        offset = self._head = _aligned(1 + len(tensors)) if self._readable else 0
        self._unmarked = bytes(self._head)
        self._places: list[tuple[TensorMeta, tuple[int, ...], int]] = []
        for tensor in tensors:
            self._places.append((tensor, _strides(tensor.shape), offset // tensor.dtype.itemsize))
            offset += _aligned(tensor.nbytes)
        only = tensors[0] if len(tensors) == 1 and not self._readable else None
        self._alone = only is not None and only.nbytes > 0 and only.sharding is None
        """Whether the buffer is one tensor and nothing else."""
        self.nbytes = tensors[0].nbytes if self._alone else max(offset, _ALIGNMENT)

    def pack(self, tensors: Sequence[torch.Tensor | None]) -> Parcel:
        """The tensors in one buffer; a missing one is marked, and becomes zeros."""
        if self._alone and (own := _bytes_of(tensors[0])) is not None:
            return Parcel(own, [], reusable=False)
        parcel = self._free.pop() if self._free else self._parcel()
        for index, (view, tensor) in enumerate(zip(parcel.views, tensors, strict=True)):
            if tensor is None:
                view.zero_()
                parcel.reusable = False
                if self._readable:
                    parcel.buffer[1 + index] = 1
            else:
                view.copy_(local(tensor.detach() if tensor.requires_grad else tensor))
        return parcel

    def recycle(self, parcel: Parcel) -> None:
        """Take back a parcel that has been sent; a few are kept."""
        if len(self._free) < _KEPT and parcel.reusable:
            self._free.append(parcel)

    def failure(self) -> Parcel:
        """A message of the same size that says only that its sender has failed."""
        parcel = self._parcel()
        # Zeros, since a GPU computes with them before it learns of the failure: as indices, what
        # happens to lie in the memory could break it for good.
        parcel.buffer.zero_()
        if self._readable:
            parcel.buffer[_STATUS] = _FAILED
        parcel.reusable = False
        return parcel

    def empty(self) -> torch.Tensor:
        """A buffer to receive into."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def marks(self, buffer: torch.Tensor) -> bytes:
        """The bytes before the tensors of what arrived; empty if they are all 0.

        Empty on a GPU, where reading would wait; the outcome of the step has failures.
        """
        # Read in place: indexing the tensor takes longer than unpacking the rest.
        marks = string_at(buffer.data_ptr(), self._head) if self._readable else b""
        return marks if marks != self._unmarked else b""

    @staticmethod
    def failed(marks: bytes) -> bool:
        """Whether what arrived comes from a rank that has failed."""
        return marks[_STATUS : _STATUS + 1] == bytes([_FAILED])

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer, sharing its memory; leaves for autograd where it says so."""
        tensors = self._views(buffer)
        for index, tensor in enumerate(tensors):
            meta = self.tensors[index]
            if meta.sharding is not None and self._mesh_for is not None:
                tensor = meta.sharding.assemble(tensor, self._mesh_for(meta.sharding))
                tensors[index] = tensor
            if meta.requires_grad:
                tensor.requires_grad_()
        return tensors

    @staticmethod
    def missing(marks: bytes) -> list[int]:
        """Indices of missing tensors; on a GPU they are sent as zeros instead."""
        return [index for index, mark in enumerate(marks[1:]) if mark]

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        # By .data each one counts its own changes: views of one tensor count them together, and
        # then autograd would refuse a backward because a neighbour was changed in place.
        alone = len(self._places) == 1
        return [
            (buffer if alone else buffer.data)
            .view(tensor.dtype)
            .as_strided(tensor.shape, strides, start)
            for tensor, strides, start in self._places
        ]

    def _parcel(self) -> Parcel:
        buffer = self.empty()
        buffer[: self._head] = 0
        return Parcel(buffer, self._views(buffer))


def _bytes_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The memory of a tensor, if all of it lies there as it is; None otherwise."""
    if tensor is None or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.detach().view(-1).view(torch.uint8)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[: len(shape)][::-1]
