"""What is saved in the background, copied to memory of the host while training goes on.

::

    save()             copies what a forward may change: buffers, values of schedulers and users
    the background     copies parameters and the state of optimizers
    optimizer.step()   waits until they are copied, and then changes them

If anybody else changes one of them before that, the save is not made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from taktline.errors import CheckpointError

__all__ = ["Memory", "Snapshot", "settle", "watch"]

_SMALL = 1 << 14
"""Bytes that are copied at once, in less time than it takes to look whether they have changed."""


@dataclass(slots=True)
class Memory:
    """What is kept from one save to the next one."""

    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    unsteady: set[str] = field(default_factory=set)
    """Tensors that were changed before they were copied."""
    versions: dict[str, int] = field(default_factory=dict)
    """Of the parameters that are not trained, at the last save."""


_pending: set[Snapshot] = set()
"""Those that a change would spoil."""


class Snapshot:
    """A copy of tensors, under their names, in place of them.

    ``trained`` ones are copied in the background. So are the parameters among the ``others`` that
    have not changed since the last save. Everything else is copied at once.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        trained: Iterable[str],
        others: Iterable[str],
        memory: Memory,
    ) -> None:
        self.tensors = tensors
        self._memory = memory
        devices = {each.device for each in tensors.values() if each.is_cuda}
        large = {name: each for name, each in tensors.items() if _is_watched(each)}
        versions = {name: large[name]._version for name in others if name in large}
        unchanged = {name for name in versions if versions[name] == memory.versions.get(name)}
        memory.versions = versions
        steady = ({*trained} | unchanged) - memory.unsteady
        self._steady = {name: each for name, each in large.items() if name in steady}
        for name in tensors.keys() - self._steady.keys():
            self._copy(name)
        self._before = self._marks()
        self._after: dict[str, tuple[int, torch.Tensor]] | None = None
        self._looking = threading.Lock()
        self._copied = threading.Event()
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def _copy(self, name: str) -> None:
        tensor, known = self.tensors[name], self._memory.copies.get(name)
        if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
            known = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        # Those of a GPU go through a stream: what is queued after them finds them done.
        self._memory.copies[name] = self.tensors[name] = known.copy_(tensor, non_blocking=True)

    def _marks(self) -> dict[str, tuple[int, torch.Tensor]]:
        """What shows a change: a count of torch, and a few elements, as some ways do not count."""
        return {name: (each._version, _few(each)) for name, each in self._steady.items()}

    def copy(self) -> None:
        """Copy what is not copied yet; in the background."""
        try:
            with ExitStack() as stack:
                for stream in self._streams.values():
                    stack.enter_context(torch.cuda.stream(stream))
                for name in self._steady:
                    self._copy(name)
        finally:
            self._copied.set()
        for stream in self._streams.values():
            stream.synchronize()

    def settle(self) -> None:
        """Wait until everything is copied: what is called after this may change the tensors."""
        self._copied.wait()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self._look()

    def _look(self) -> None:
        with self._looking:
            if self._after is None:
                self._after = self._marks()
        _pending.discard(self)

    def require_unchanged(self) -> None:
        """Raise if a tensor was changed before it was copied; in the background."""
        self._look()
        assert self._after is not None
        for device in self._streams:
            torch.cuda.synchronize(device)
        changed = [
            name
            for name, (count, few) in self._before.items()
            if count != self._after[name][0] or not torch.equal(few, self._after[name][1])
        ]
        if changed:
            self._memory.unsteady |= set(changed)
            name = changed[0].partition("/")[2]
            raise CheckpointError(
                f"{name} was changed before it was copied; change it after the next "
                "optimizer.step(), or save without async_save"
            )


def _is_watched(tensor: torch.Tensor) -> bool:
    """Whether it is worth copying it later, and a change of it would be seen."""
    known = tensor.device.type in ("cpu", "cuda") and not tensor.is_inference()
    return known and tensor.nbytes > _SMALL


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A few elements from all over a tensor, as bytes: those that are no number are equal, too."""
    some = tensor[tuple(slice(None, None, max(1, size // 8)) for size in tensor.shape)]
    plain = torch.empty(some.shape, dtype=some.dtype, device=some.device).copy_(some)
    return plain.reshape(-1).view(torch.uint8)


def watch(snapshot: Snapshot) -> None:
    """Let whoever changes tensors wait until a snapshot of them is made."""
    _watch_optimizers()
    _pending.add(snapshot)


def settle(*_: object) -> None:
    """Wait until all that is being saved is copied, before it is changed."""
    for snapshot in list(_pending):
        snapshot.settle()


@cache
def _watch_optimizers() -> None:
    # All of the process: one that is not saved may change a parameter, too.
    register_optimizer_step_pre_hook(settle)
