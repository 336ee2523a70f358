"""Tensors over communicators of torch, one for each channel: what GPUs need.

Not ``new_group``: all ranks of the program have to call it or, made by its members alone, its name
counts the groups of a member, which differs along a pipeline. Here only the two ranks of a channel
take part. One communicator of nccl serves both directions of a pair in one order, so each channel
has its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from taktline.errors import TaktlineError, TransportError
from taktline.transport.base import Channel, Handle, bytes_of

_LOST = re.compile(
    r"connection|connect |socket|broken pipe|remote process|pair\.cc|network|communicator|aborted",
    re.IGNORECASE,
)
"""What gloo and nccl say when the other rank is gone."""

Failed: TypeAlias = Callable[[RuntimeError], TaktlineError]
"""Returns the error to raise for an error of torch."""


class Communicator:
    """One rank's end of a channel, over a communicator of torch between its two ranks.

    ``peer`` is the number of the other rank in it: 0 or 1.
    """

    def __init__(self, communicator: Any, peer: int, failed: Failed) -> None:
        self._communicator = communicator
        self._peer = peer
        self._failed = failed

    @classmethod
    def connect(
        cls, backend: str, store: Store, peer: int, timeout: timedelta, failed: Failed
    ) -> Communicator:
        """Connect with the other rank, which calls this, too; ``store`` is where they meet."""
        try:
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                if hasattr(options, "_timeout"):  # or it has torch's own
                    options._timeout = timeout
                made: Any = dist.ProcessGroupNCCL(store, 1 - peer, 2, options)
            elif backend == "gloo":  # for tests without a GPU
                made = dist.ProcessGroupGloo(store, 1 - peer, 2, timeout)
            else:
                raise TransportError(f"{backend!r} is not supported yet; use gloo or nccl")
        except RuntimeError as error:
            raise failed(error) from error
        return cls(made, peer, failed)

    def send(
        self, buffer: torch.Tensor, marks: bytes | bytearray = b"", *, asks: bool = False
    ) -> Handle:
        """Send a buffer without waiting; no marks are sent.

        With ``asks`` the handle asks the device whether it is done: that takes time, and a capture
        does not allow it.
        """
        return self._post(self._communicator.send, buffer, asks=asks)

    def receive(self, buffer: torch.Tensor, marks: bytes | bytearray = b"") -> Handle:
        """Receive into a buffer without waiting."""
        return self._post(self._communicator.recv, buffer)

    def shut(self) -> None:
        """End every wait; from any thread. gloo has no way to do so."""
        if isinstance(self._communicator, getattr(dist, "ProcessGroupNCCL", ())):
            self._communicator.abort()

    def _post(
        self, post: Callable[..., dist.Work | None], buffer: torch.Tensor, *, asks: bool = False
    ) -> Handle:
        try:
            work = post([bytes_of(buffer)], self._peer, 0)
        except RuntimeError as error:
            raise self._failed(error) from error
        assert work is not None
        return _Message(work, self._failed, asks)


class _Message:
    """A message under way; if it fails, its handle raises why."""

    __slots__ = ("_asks", "_failed", "_work")

    def __init__(self, work: dist.Work, failed: Failed, asks: bool) -> None:
        self._work = work
        self._failed = failed
        self._asks = asks

    @property
    def done(self) -> bool:
        """Whether the message is known to have left."""
        return self._asks and self._work.is_completed()

    def wait(self) -> object:
        """Return once the buffer may be used."""
        try:
            return self._work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error


def ends_of(channel: Channel) -> tuple[int, ...]:
    """The two ranks of a channel, the lower one first."""
    return tuple(sorted((channel.sender, channel.receiver)))


def symptoms_of(error: RuntimeError) -> tuple[bool, bool]:
    """Whether a wait of torch has timed out, and whether the other rank is gone."""
    text = str(error)
    timed_out = "timed out" in text.lower() or "timeout" in text.lower()
    return timed_out, isinstance(error, dist.DistNetworkError) or bool(_LOST.search(text))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries tensors of a device."""
    config = dist.get_backend_config(group)
    backends = dict(part.split(":") for part in config.split(","))
    if device.type not in backends or (backends[device.type] == "gloo" and device.type != "cpu"):
        raise TransportError(
            f"the process group ({config}) does not carry tensors on {device}; initialise it with "
            "a backend that does, such as nccl, or run several ranks on one GPU with local.run"
        )
    return backends[device.type]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """After how long a wait in a group is given up."""
    for device in getattr(group, "_device_types", ()):
        backend = getattr(group, "_get_backend", lambda _: None)(device)
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=30)


def default_group() -> dist.ProcessGroup:
    """The process group of the program."""
    group = dist.group.WORLD
    if group is None:
        raise TransportError("there is no process group; call init_process_group first")
    return group


def name_of(group: dist.ProcessGroup) -> str:
    """What tells groups of the same processes apart; the same on all of them."""
    try:
        return group.group_name
    except RuntimeError:  # nobody has given it a name
        return ""
