"""Frozen weights that live on the host, and are on the device while their stage computes.

::

    UNSHARD    storages get memory of the device, and are filled on the stream of copies
    F, B, …    the first one waits for that
    RESHARD    the storages are emptied: nothing is written back, as no number has changed

Between steps a weight is a tensor of the host, to be read, saved and loaded as any other. On the
device its storage is always the same one, emptied and filled: graphs of autograd have views of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from taktline.errors import OffloadError
from taktline.meta import is_sharded, local
from taktline.stage.names import named_parameters
from taktline.stage.offload import Copies, copies_on, raw


@dataclass(slots=True, eq=False)
class _Part:
    """One storage, which several tensors of several stages may have."""

    device: torch.UntypedStorage
    host: torch.UntypedStorage
    users: int = 0
    """How many stages need it on the device."""
    tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Each tensor, with what it is on the device, and on the host."""

    def place(self, *, on_device: bool) -> None:
        for tensor, there, here in self.tensors:
            tensor.data = there if on_device else here


Parts = dict[int, _Part]
"""What streams in a process, by the identities of its tensors."""


class Streamed:
    """The frozen weights of one stage."""

    def __init__(self, module: nn.Module, device: torch.device, known: Parts) -> None:
        """``known`` are those of the stages before, which may share weights with this one."""
        self._copies = copies_on(device)
        self.parameters: dict[str, nn.Parameter] = {}
        """Those that stream, by their names in the stage."""
        self._is_there = False
        self._arrived: Any = None
        stay = {_place(each) for tensor in _staying(module) for each in _plain(tensor)}
        groups: dict[int, list[torch.Tensor]] = {}
        shared: list[_Part] = []
        for name, parameter in named_parameters(module).items():
            plain = [*_plain(parameter)]
            if parameter.requires_grad or any(_place(each) in stay for each in plain):
                continue
            if is_sharded(parameter):
                raise OffloadError(
                    f"{name} is sharded over ranks, so it cannot stream; leave out stream_weights, "
                    "or the tensor parallelism of frozen weights"
                )
            self.parameters[name] = parameter
            for each in plain:
                if id(each) in known:
                    shared.append(known[id(each)])
                else:
                    groups.setdefault(_place(each), []).append(each)
        made = [_moved(tensors, self._copies, known) for tensors in groups.values()]
        self._parts = list(dict.fromkeys([*shared, *made]))
        for part in shared:
            part.place(on_device=False)  # it was moved to the device with this stage

    @property
    def nbytes(self) -> int:
        """What they take on the device while they are there."""
        return sum(part.host.nbytes() for part in self._parts)

    def fetch(self) -> None:
        """UNSHARD: start to copy them to the device."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                raise OffloadError(
                    f"{name} streams, so it stays frozen, but it requires a gradient now; make "
                    "another pipeline after requires_grad_()"
                )
        self._is_there, new = True, [part for part in self._parts if not part.users]
        for part in self._parts:
            part.users += 1
        for part in new:
            part.device.resize_(part.host.nbytes())
            part.place(on_device=True)
        pairs = [(raw(part.device), raw(part.host)) for part in new]
        self._arrived = self._copies.copy(pairs, inward=True)

    def arrive(self) -> None:
        """Let the current stream wait until they are there."""
        if self._arrived is not None:
            self._copies.wait(self._arrived)
            self._arrived = None

    def release(self) -> None:
        """RESHARD: free the memory of the device; also after a failure."""
        if not self._is_there:
            return
        self.arrive()  # memory that is being written to cannot be given away
        self._is_there = False
        for part in self._parts:
            part.users -= 1
            if not part.users:
                part.place(on_device=False)
                part.device.resize_(0)


def _staying(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of a stage that do not stream."""
    yield from module.buffers()
    yield from (each for each in module.parameters() if each.requires_grad)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor; or those inside of one of another class, such as a quantised weight."""
    if hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        for name in names:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _place(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage()._cdata


def _moved(tensors: list[torch.Tensor], copies: Copies, known: Parts) -> _Part:
    """Move tensors of one storage to the host."""
    before = tensors[0].untyped_storage()
    host = before
    if copies.device.type != "cpu":
        buffer = copies.take(before.nbytes())
        buffer.copy_(raw(before))
        host = buffer.untyped_storage()
    part = _Part(torch.UntypedStorage(before.nbytes(), device=copies.device), host)
    for each in tensors:
        there, here = (
            torch.empty(0, dtype=each.dtype, device=storage.device).set_(
                storage, each.storage_offset(), each.shape, each.stride()
            )
            for storage in (part.device, part.host)
        )
        part.tensors.append((each, there, here))
        known[id(each)] = part
    part.place(on_device=False)
    part.device.resize_(0)
    return part
