"""Ranks as processes, over torch.distributed: gloo, nccl, or any other backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from taktline.errors import TransportError
from taktline.transport.base import Channel, Handle, Post

__all__ = ["Distributed"]

_CPU = torch.device("cpu")

_TAG = 0x7A4B
"""Keeps the channels' messages apart from others that a program sends over the same group."""

_FEW = 4
"""Up to so many ranks, each sends its numbers to each other one: half the time of a collective."""

_known: WeakKeyDictionary[dist.ProcessGroup, Distributed] = WeakKeyDictionary()


class Distributed:
    """The ranks of a process group.

    On gloo a channel is a tag. On nccl, where one communicator serves both directions of a pair in
    one order, it is a process group of its own; and the small exchanges, which live on the CPU,
    go over a gloo group beside it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device = _CPU,
        *,
        group_per_channel: bool | None = None,
    ) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.device = device
        # Weak, so that a group that the program has dropped is not kept by what is known of it.
        self._weak_group = ref(group)
        self._backend = _backend(group, device)
        self._group_per_channel = (
            self._backend != "gloo" if group_per_channel is None else group_per_channel
        )
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._made_control = None
        if "cpu:gloo" not in dist.get_backend_config(group):
            self._made_control = _subgroup(group, range(self.size), "gloo")
        calm_gloo()

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device = _CPU) -> Distributed:
        """The transport of a group, made once."""
        known = _known.get(group)
        if known is None or known.device != device:
            known = _known[group] = cls(group, device)
        return known

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, which somebody else keeps."""
        found = self._weak_group()
        if found is None:
            raise TransportError("the process group is gone; make the stages anew with a new one")
        return found

    def open(self, channels: Sequence[Channel]) -> None:
        """Make the groups of those channels that have one of their own and are not yet known."""
        if not self._group_per_channel:
            return
        for channel in channels:
            ends = (channel.sender, channel.receiver)
            if self.rank in ends and channel not in self._groups:
                self._groups[channel] = _subgroup(self.group, ends, self._backend)
                self._greet(channel)

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        """What sends a buffer without waiting."""
        group, peer, tag = self._route(channel, channel.receiver)
        # The group's own method: torch.distributed.isend takes twice the time of a small message.
        return lambda buffer: _checked(group.send([buffer], peer, tag))

    def receiver(self, channel: Channel) -> Post:
        """What receives into a buffer without waiting."""
        group, peer, tag = self._route(channel, channel.sender)
        return lambda buffer: _checked(group.recv([buffer], peer, tag))

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Give every rank the numbers of every rank."""
        if self.size == 1 or not numbers:
            return [list(numbers)] * self.size
        control = self._made_control or self.group
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyone = torch.empty(self.size, len(numbers), dtype=torch.int64)
        if self.size > _FEW:
            control._allgather_base(everyone, mine).wait()
            return everyone.tolist()
        everyone[self.rank] = mine
        peers = [peer for peer in range(self.size) if peer != self.rank]
        tag = _TAG + 2
        handles = [control.recv([everyone[peer]], peer, tag) for peer in peers]
        handles += [control.send([mine], peer, tag) for peer in peers]
        for handle in handles:
            _checked(handle).wait()
        return everyone.tolist()

    def _greet(self, channel: Channel) -> None:
        """Send one byte: nccl connects at the first message, and waits for the other end to."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        post = self.sender(channel) if channel.sender == self.rank else self.receiver(channel)
        post(byte).wait()

    def _route(self, channel: Channel, peer: int) -> tuple[dist.ProcessGroup, int, int]:
        if self._group_per_channel:
            group = self._groups[channel]
            return group, dist.get_group_rank(group, dist.get_global_rank(self.group, peer)), 0
        return self.group, peer, _TAG + channel.gradients


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that carries tensors of a device."""
    config = dist.get_backend_config(group)
    backends = dict(part.split(":") for part in config.split(","))
    if device.type not in backends or (backends[device.type] == "gloo" and device.type != "cpu"):
        raise TransportError(
            f"the process group ({config}) does not carry tensors on {device}; initialise it with "
            "a backend that does, such as nccl, or run several ranks on one GPU with local.run"
        )
    return backends[device.type]


def calm_gloo() -> None:
    """Keep gloo's event loops from interrupting the very calls that they then wait for.

    Such a loop spins while a call holds the lock of a connection. If the call's own write has woken
    it on the same core, it spins away a whole time slice in which the call cannot go on: some
    milliseconds, for a message of microseconds. A thread of the batch class waits its turn.
    """
    with suppress(AttributeError, OSError):  # neither there nor needed except on Linux
        for thread in Path("/proc/self/task").iterdir():
            if (thread / "comm").read_text().startswith("gloo"):
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def _checked(work: dist.Work | None) -> Handle:
    if work is None:
        raise TransportError("the process group took a message without giving a handle for it")
    return work


def _subgroup(group: dist.ProcessGroup, ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
    """A group of some of a group's ranks; only these take part in making it."""
    members = sorted(dist.get_global_rank(group, rank) for rank in ranks)
    made = dist.new_group(members, backend=backend, use_local_synchronization=True)
    if not isinstance(made, dist.ProcessGroup):
        raise TransportError(f"no process group could be made of the ranks {members}")
    return made
