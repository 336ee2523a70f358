"""How values travel: the tensors of a boundary in one buffer, with a few marks beside it.

The buffer of a single tensor has its shape. Several tensors are in a buffer of bytes, one after the
other, each at a multiple of 16. The marks are bytes::

    byte 0   status: 0, or 1 from a rank that has failed
    byte 1   one for each tensor: 1 if there is none (a gradient that nothing contributes to)

Between GPUs no marks are sent, as reading them would wait. On a GPU a single tensor is its own
buffer. On the CPU it is copied, as a stage may change it in place before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, TypeGuard

import torch

from taktline.meta import Sharding, TensorMeta, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CPU = torch.device("cpu")
_ALIGNMENT = 16
_FAILED = 1
_KEPT = 4
"""How many sent parcels are kept for the next messages of their layout."""


@dataclass(slots=True, eq=False)
class Parcel:
    """A buffer to send, with its marks, and the room for each tensor; none if it is used once."""

    buffer: torch.Tensor
    marks: bytes
    views: list[torch.Tensor]


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
        self.unmarked = bytes(1 + len(tensors))
        """The marks of a message with all tensors."""
        only = tensors[0] if len(tensors) == 1 else None
        self._only = only if only and only.nbytes > 0 and only.sharding is None else None
        """The tensor whose shape the buffer has."""
        offset = 0
        self._places: list[tuple[TensorMeta, tuple[int, ...], int]] = []
        for tensor in tensors:
            self._places.append((tensor, _strides(tensor.shape), offset // tensor.dtype.itemsize))
            offset += _aligned(tensor.nbytes)
        self.nbytes = self._only.nbytes if self._only else max(offset, _ALIGNMENT)

    def pack(self, tensors: Sequence[torch.Tensor | None]) -> Parcel:
        """The tensors in one buffer; a missing one is marked, and becomes zeros."""
        if self._only is not None and _is_buffer(tensors[0], self._only):
            return Parcel(tensors[0].detach(), self.unmarked, [])
        parcel = self._free.pop() if self._free else self._parcel()
        parcel.marks = self.unmarked
        for view, tensor in zip(parcel.views, tensors, strict=True):
            if tensor is None:
                view.zero_()
                parcel.marks = bytes([0, *(each is None for each in tensors)])
            else:
                view.copy_(local(tensor.detach() if tensor.requires_grad else tensor))
        return parcel

    def recycle(self, parcel: Parcel) -> None:
        """Take back a parcel that has been sent; a few are kept."""
        if len(self._free) < _KEPT and parcel.views:
            self._free.append(parcel)

    def failure(self) -> Parcel:
        """A message of the same size that says only that its sender has failed."""
        # Zeros, since a GPU computes with them before it learns of the failure: as indices, what
        # happens to lie in the memory could break it for good.
        return Parcel(self.empty().zero_(), bytes([_FAILED, *self.unmarked[1:]]), [])

    def empty(self) -> torch.Tensor:
        """A buffer to receive into."""
        if self._only is not None:
            return torch.empty(self._only.shape, dtype=self._only.dtype, device=self.device)
        return torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    @staticmethod
    def failed(marks: Sequence[int]) -> bool:
        """Whether what arrived comes from a rank that has failed."""
        return marks[0] == _FAILED

    @staticmethod
    def missing(marks: Sequence[int]) -> list[int]:
        """Indices of missing tensors."""
        return [index for index, mark in enumerate(marks[1:]) if mark]

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

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        if self._only is not None:
            return [buffer]
        # By .data each one counts its own changes: views of one tensor count them together, and
        # then autograd would refuse a backward because a neighbour was changed in place.
        return [
            buffer.data.view(tensor.dtype).as_strided(tensor.shape, strides, start)
            for tensor, strides, start in self._places
        ]

    def _parcel(self) -> Parcel:
        buffer = self.empty()
        return Parcel(buffer, self.unmarked, self._views(buffer))


def _is_buffer(tensor: torch.Tensor | None, meta: TensorMeta) -> TypeGuard[torch.Tensor]:
    """Whether a tensor can be sent as it is."""
    return (
        tensor is not None
        and not tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.dtype is meta.dtype
        and tensor.shape == meta.shape
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[: len(shape)][::-1]
