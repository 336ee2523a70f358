"""What a forward has saved for its backward, taken to the host and back.

::

    F          hooks of autograd note every saved tensor
    OFFLOAD    each storage that nobody else holds is copied to the host, on a stream of its own
    …          once the copy has ended, the storage is emptied: the memory of the device is free
    RELOAD     the storage gets memory again, and is copied back, on another stream
    B or I     waits for that

Storages move, not tensors: all views of one travel together, once, and autograd gets the tensors
that it has saved. The streams wait for each other, and the host for none of them, so all of this
can be part of a CUDA graph.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

from taktline.checks import number_in_environment
from taktline.errors import OffloadError
from taktline.private import private
from taktline.text import size_text

_Saved: TypeAlias = tuple[torch.Tensor, int]
"""A saved tensor, and how often it had been changed in place."""
_SHARE = 0.8
"""Of the memory of a machine, for all of its ranks."""
_count_users = private("torch._C._storage_Use_Count", "offload of activations")


class Copies:
    """The copies of a device: a stream for each direction, and memory on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pins = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._pins else []
        self._free: dict[int, list[torch.Tensor]] = {}
        """Buffers by their size: those of one micro-batch are reused for the next."""
        self.held = 0
        """The bytes of all buffers."""
        self.limit = _host_limit()
        self.stamp: Callable[[], Any] = lambda: None
        """Marks a moment of the current stream, while there is a trace."""
        self.latest: tuple[Any, Any] = None, None
        """When the latest copy began and ended."""

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer on the host, pinned for a GPU."""
        if free := self._free.get(nbytes):
            return free.pop()
        if self.held + nbytes > self.limit:
            raise OffloadError(
                f"no room on the host for {size_text(nbytes)} more: {size_text(self.held)} of "
                f"{size_text(self.limit)} are in use; offload fewer micro-batches, or set "
                "TAKTLINE_HOST_BYTES to what a rank may use"
            )
        try:
            make = _pinned if self._pins and nbytes else torch.empty
            buffer = make(nbytes, dtype=torch.uint8)
        except (RuntimeError, OSError) as error:
            raise OffloadError(
                f"the host has no {size_text(nbytes)} more beside {size_text(self.held)} of this "
                f"rank: {str(error).partition(chr(10))[0]}; offload fewer micro-batches"
            ) from error
        self.held += nbytes
        return buffer

    def give(self, buffers: Iterable[torch.Tensor]) -> None:
        """Take buffers back, whose copies the current stream has waited for."""
        for buffer in buffers:
            self._free.setdefault(buffer.nbytes, []).append(buffer)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, inward: bool) -> Any:
        """Copy to the first of each pair; returns the end of it, unless it has ended."""
        stream = self._streams[inward] if self._streams else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            began = self.stamp()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self.latest = began, self.stamp()
        return None if stream is None else stream.record_event()

    def wait(self, end: Any) -> None:
        """Let the current stream wait for the end of a copy."""
        if end is not None:
            torch.cuda.current_stream(self.device).wait_event(end)

    def synchronize(self) -> None:
        """Wait for all copies, after a failure."""
        for stream in self._streams:
            stream.synchronize()


@cache
def copies_on(device: torch.device) -> Copies:
    """The copies of a device, which all stages of this process share."""
    return Copies(device)


def _pinned(nbytes: int, *, dtype: torch.dtype) -> torch.Tensor:
    """Pinned memory of just this size, in pages of its own; that of torch is up to twice as large.

    It is never given back: its buffers are used again until the process ends.
    """
    buffer = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype)
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(buffer.data_ptr(), nbytes, 0))
    return buffer


def _host_limit() -> int:
    """The bytes of the host that this rank may use."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(number_in_environment("TAKTLINE_HOST_BYTES", _SHARE * pages / ranks, "bytes"))


class _Unpack:
    """Gives autograd a tensor that it has saved."""

    def __call__(self, saved: _Saved) -> torch.Tensor:
        tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a saved tensor of shape {[*tensor.shape]} is at version "
                f"{tensor._version}; expected version {version} instead"
            )
        if _is_plain(tensor) and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise OffloadError(
                f"a saved tensor of shape {[*tensor.shape]} is on the host: call no backward "
                "yourself in a stage that is offloaded"
            )
        return tensor


class Activations:
    """What one forward has saved."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._noted: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """Each storage, and how many saved tensors have it."""
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Each storage that was copied, and its buffer on the host."""
        self._left: Any = None
        self._arrived: Any = None
        """The ends of the copies."""
        self._is_there = True
        """Whether the storages have memory of the device."""

    def noting(self) -> AbstractContextManager[object]:
        """A block that notes what is saved in it."""
        return saved_tensors_hooks(self._pack, _Unpack())

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # Detached: an output refers to its node, which will refer to what is returned here.
        saved = tensor.detach()
        if _is_plain(saved):
            storage = saved.untyped_storage()
            _, count = self._noted.get(storage._cdata, (storage, 0))
            self._noted[storage._cdata] = storage, count + 1
        return saved, tensor._version

    @property
    def nbytes(self) -> int:
        """The bytes on the host."""
        return sum(host.nbytes for _, host in self._moved)

    def leave(self, inputs: Sequence[torch.Tensor]) -> None:
        """Begin to copy what nobody else holds, besides the stage its ``inputs``."""
        copies, noted = self._copies, self._noted
        ours = Counter(
            tensor.untyped_storage()._cdata for tensor in inputs if type(tensor) is torch.Tensor
        )
        for place, (storage, count) in noted.items():
            # One more: Python's object for the storage.
            alone = _count_users(place) <= count + ours[place] + 1
            if alone and storage.device.type == copies.device.type and storage.resizable():
                self._moved.append((storage, copies.take(storage.nbytes())))
        noted.clear()
        self._left = copies.copy(
            ((host, raw(storage)) for storage, host in self._moved), inward=False
        )

    def release(self) -> None:
        """Let the current stream wait for the copy, and empty the storages."""
        if self._is_there and self._moved:
            self._copies.wait(self._left)
            for storage, _ in self._moved:
                storage.resize_(0)
            self._is_there = False

    def come_back(self) -> None:
        """Begin to copy back."""
        self.release()
        for storage, host in self._moved:
            storage.resize_(host.nbytes)
        self._is_there = True
        self._arrived = self._copies.copy(
            ((raw(storage), host) for storage, host in self._moved), inward=True
        )

    def arrive(self) -> None:
        """Let the current stream wait until all is back."""
        self._copies.wait(self._arrived)
        self._copies.give(host for _, host in self._moved)
        self._moved.clear()

    def forget(self) -> None:
        """After a failure: what is on its way is not needed any more."""
        if self._moved:
            self._copies.synchronize()
            self._copies.give(host for _, host in self._moved)
            self._moved.clear()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all that its storage is for: no DTensor, and not sparse."""
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided


def raw(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
