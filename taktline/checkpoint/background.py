"""Saves in the background: tensors are copied to memory of the host, and then written.

::

    save()             copies tensors that a forward may change: buffers, and values of users
    the background     copies parameters and the state of optimizers, and then writes all
    optimizer.step()   waits until they are copied, and then changes them

If other code changes one of them before that, the save fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from taktline.errors import CheckpointError

_SMALL = 1 << 14
"""The most bytes that are faster to copy at once than to watch for changes."""


@dataclass(slots=True)
class Memory:
    """Kept from one save to the next one."""

    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    unsteady: set[str] = field(default_factory=set)
    """Tensors that were changed before they were copied."""
    versions: dict[str, int] = field(default_factory=dict)
    """The versions of parameters that are not trained, at the last save."""


class Snapshot:
    """Replaces tensors by copies, under their names.

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
        # Copies from a GPU are queued on a stream, in order.
        self._memory.copies[name] = self.tensors[name] = known.copy_(tensor, non_blocking=True)

    def _marks(self) -> dict[str, tuple[int, torch.Tensor]]:
        """Marks that show a change: torch's version, and a few elements, as versions miss some."""
        return {name: (each._version, _few(each)) for name, each in self._steady.items()}

    def copy(self) -> None:
        """Copy the remaining tensors; in the background."""
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
        """Wait until everything is copied; then tensors may be changed."""
        if self._after is None:
            self._copied.wait()
            for device, stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)
            self._look()

    def _look(self) -> dict[str, tuple[int, torch.Tensor]]:
        """The marks after the copy, of the first that looks: the optimizer may go on then."""
        with self._looking:
            if self._after is None:
                self._after = self._marks()
            return self._after

    def require_unchanged(self) -> None:
        """Raise if a tensor was changed before it was copied; in the background."""
        after = self._look()
        for device in self._streams:
            torch.cuda.synchronize(device)
        changed = [
            name
            for name, (count, few) in self._before.items()
            if count != after[name][0] or not torch.equal(few, after[name][1])
        ]
        if changed:
            self._memory.unsteady |= set(changed)
            name = changed[0].partition("/")[2]
            raise CheckpointError(
                f"{name} was changed before it was copied; change it after the next "
                "optimizer.step(), or save without async_save"
            )

    def release(self) -> None:
        """Keep no tensor alive any more, once all is written."""
        self.tensors, self._steady = {}, {}


def _is_watched(tensor: torch.Tensor) -> bool:
    """Whether a tensor is large enough to copy later, and changes of it would be seen."""
    known = tensor.device.type in ("cpu", "cuda") and not tensor.is_inference()
    return known and tensor.nbytes > _SMALL


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A few elements from all over a tensor, as bytes, so that nan equals nan."""
    some = tensor[tuple(slice(None, None, max(1, size // 8)) for size in tensor.shape)]
    plain = torch.empty(some.shape, dtype=some.dtype, device=some.device).copy_(some)
    return plain.reshape(-1).view(torch.uint8)


class _Running(NamedTuple):
    """A save that is being written; its tensors are copied first."""

    snapshot: Snapshot
    written: Future[None]


_running: dict[tuple[Path, int], _Running] = {}
"""By folder and process."""


@cache
def memory_of(folder: Path, place: int) -> Memory:
    """What is kept of the last save of a process to a folder; empty before the first one."""
    return Memory()


def start(folder: Path, place: int, snapshot: Snapshot, run: Callable[[Snapshot], None]) -> None:
    """Call a function that copies and writes a snapshot, in the background."""
    _watch_optimizers()
    thread = ThreadPoolExecutor(1, "taktline save")  # at its end, Python waits for it
    written = thread.submit(run, snapshot)
    written.add_done_callback(lambda _: snapshot.release())
    _running[folder, place] = _Running(snapshot, written)
    thread.shutdown(wait=False)


def wait(folder: Path, place: int = 0) -> None:
    """Wait for the save that is being written to a folder; raises its error."""
    key = folder.resolve(), place
    if key in _running:
        try:
            _running[key].written.result()
        finally:
            del _running[key]


def settle(*_: object) -> None:
    """Wait until all tensors that are being saved are copied."""
    for running in list(_running.values()):
        running.snapshot.settle()


def finish() -> None:
    """Wait until all saves are written; the next ones raise their errors."""
    for running in list(_running.values()):
        running.written.exception()


@cache
def _watch_optimizers() -> None:
    # For all optimizers: one that is not saved may change a parameter, too.
    register_optimizer_step_pre_hook(settle)
