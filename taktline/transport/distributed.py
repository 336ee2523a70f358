"""Ranks as processes, over torch.distributed: gloo or nccl."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from taktline.errors import LostRankError, StallError, TransportError
from taktline.transport.base import Channel, Handle, Post
from taktline.transport.board import Board
from taktline.transport.frames import FRAME, Frame, agreed, framed

__all__ = ["Distributed"]

_CPU = torch.device("cpu")

_TAG = 0x7A4B
"""Keeps the channels' messages apart from others that a program sends over the same group."""

_FEW = 4
"""Up to so many ranks, each sends its numbers to each other one: half the time of a collective."""

_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, Distributed]] = WeakKeyDictionary()
"""By group and type of device."""

_LOST = re.compile(
    r"connection|connect |socket|broken pipe|remote process|pair\.cc|network|communicator|aborted",
    re.IGNORECASE,
)
"""What gloo and nccl say when the other end is gone; all else has other reasons."""


class _Link(Protocol):
    """What a process group and its backends have in common."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> dist.Work: ...


class Distributed:
    """The ranks of a process group.

    On gloo a channel is a tag. On nccl, where one communicator serves both directions of a pair in
    one order, it has a communicator of its own; and the small exchanges, which live on the CPU, go
    over gloo beside it.
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
        self._links: dict[Channel, _Link] = {}
        self._store = self._own_store(group)
        self._board: Board | None = None
        self._made_control: Any = None
        if "cpu:gloo" not in dist.get_backend_config(group):
            self._made_control = _connect("gloo", self._store, "control", self.rank, self.size)
        calm_gloo()

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device = _CPU) -> Distributed:
        """The transport of a group for a type of device, made once."""
        known = _known.setdefault(group, {})
        if device.type not in known:
            known[device.type] = cls(group, device)
        return known[device.type]

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, which somebody else keeps."""
        found = self._weak_group()
        if found is None:
            raise TransportError("the process group is gone; make the stages anew with a new one")
        return found

    def open(self, channels: Sequence[Channel]) -> None:
        """Connect those channels of this rank that have a link of their own, and none yet."""
        if not self._group_per_channel:
            return
        for channel in channels:
            ends = (channel.sender, channel.receiver)
            if self.rank in ends and channel not in self._links:
                name, end = str(channel), ends.index(self.rank)
                self._links[channel] = _connect(self._backend, self._store, name, end, 2)
                self._greet(channel)

    def _own_store(self, group: dist.ProcessGroup) -> Store:
        """Where the ends of a link find each other, apart from those of earlier transports."""
        store = group.get_group_store()
        generation = store.add(f"taktline/{self.rank}", 1)
        return PrefixStore(f"taktline/{generation}", store)

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        """What sends a buffer without waiting."""
        group, peer, tag = self._route(channel, channel.receiver)
        # The group's own method: torch.distributed.isend takes twice the time of a small message.
        return _poster(group.send, channel, self.rank, channel.receiver, peer, tag)

    def receiver(self, channel: Channel) -> Post:
        """What receives into a buffer without waiting."""
        group, peer, tag = self._route(channel, channel.sender)
        return _poster(group.recv, channel, self.rank, channel.sender, peer, tag)

    @property
    def board(self) -> Board:
        """Where each rank leaves word of itself."""
        if self._board is None:
            # A connection of its own, since another thread uses it.
            clone: Callable[[], Store] = getattr(self._store, "clone")  # noqa: B009
            self._board = Board(clone(), self.rank, self.size)
        return self._board

    def exchange(
        self, numbers: Sequence[int], what: str = "an exchange", *, ragged: bool = False
    ) -> list[list[int]]:
        """Give every rank the numbers of every rank."""
        if self.size == 1:
            return [list(numbers)]
        arrived = self._swap(framed(numbers, what), [FRAME] * self.size, what)
        frames = [Frame.read(words, rank) for rank, words in enumerate(arrived)]
        agreed(frames, ragged=ragged)
        missing = [frame.missing for frame in frames]
        if not any(missing):
            return [frame.numbers for frame in frames]
        rest = torch.tensor(
            numbers[len(numbers) - missing[self.rank] :], dtype=torch.int64, device=_CPU
        )
        return [
            [*frame.numbers, *more.tolist()]
            for frame, more in zip(frames, self._swap(rest, missing, what), strict=True)
        ]

    def _swap(self, mine: torch.Tensor, sizes: Sequence[int], what: str) -> list[torch.Tensor]:
        """The numbers of every rank, of which each knows how many they are."""
        control = self._made_control or self.group
        if self.size > _FEW:
            padded = torch.zeros(max(sizes), dtype=torch.int64, device=_CPU)
            padded[: len(mine)] = mine
            everyone = torch.empty(self.size, max(sizes), dtype=torch.int64, device=_CPU)
            try:
                control._allgather_base(everyone.view(-1), padded).wait()
            except RuntimeError as error:
                raise _failure(error, self.rank, None, what) from error
            return [row[:size] for row, size in zip(everyone, sizes, strict=True)]
        arrived = [torch.empty(size, dtype=torch.int64, device=_CPU) for size in sizes]
        arrived[self.rank] = mine
        errors: list[TransportError] = []
        handles: list[Handle] = []
        for peer in range(self.size):
            if peer != self.rank:
                for post, data in ((control.recv, arrived[peer]), (control.send, mine)):
                    send = _poster(post, what, self.rank, peer, peer, _TAG + 2)
                    with _collecting(errors):
                        handles += [send(data)] if len(data) else []
        # All of them, even if one is lost: the others wait for this rank's numbers.
        for handle in handles:
            with _collecting(errors):
                handle.wait()
        if errors:
            raise errors[0]
        return arrived

    def _greet(self, channel: Channel) -> None:
        """Send one byte: nccl connects at the first message, and waits for the other end to."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        post = self.sender(channel) if channel.sender == self.rank else self.receiver(channel)
        post(byte).wait()

    def _route(self, channel: Channel, peer: int) -> tuple[_Link, int, int]:
        if self._group_per_channel:
            return self._links[channel], int(peer == channel.receiver), 0
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


class _Message:
    """A message under way; if it fails, its handle tells whose it was."""

    __slots__ = ("_peer", "_rank", "_what", "_work")

    def __init__(self, work: dist.Work, what: object, rank: int, peer: int) -> None:
        self._work = work
        self._what = what
        self._rank = rank
        self._peer = peer

    def wait(self) -> object:
        """Return once the buffer may be used."""
        try:
            return self._work.wait()
        except RuntimeError as error:
            raise _failure(error, self._rank, self._peer, self._what) from error


def _poster(
    post: Callable[[list[torch.Tensor], int, int], dist.Work | None],
    what: object,
    rank: int,
    peer: int,
    address: int,
    tag: int,
) -> Post:
    """What sends or receives buffers; ``address`` is the peer's rank on the link."""

    def posted(buffer: torch.Tensor) -> Handle:
        try:
            work = post([buffer], address, tag)
        except RuntimeError as error:
            raise _failure(error, rank, peer, what) from error
        if work is None:
            raise TransportError("the process group took a message without giving a handle for it")
        return _Message(work, what, rank, peer)

    return posted


def _failure(error: RuntimeError, rank: int, peer: int | None, what: object) -> TransportError:
    """What became of a message, in words."""
    who = "another rank" if peer is None else f"rank {peer}"
    if "timed out" in str(error).lower():
        return StallError(f"{who} has not answered rank {rank} in time ({what})", peer=peer)
    if not isinstance(error, dist.DistNetworkError) and not _LOST.search(str(error)):
        return TransportError(f"rank {rank} cannot talk to {who} ({what}): {error}")
    text = f"rank {rank} has lost {who} ({what}): its process has ended, or cannot be reached"
    return LostRankError(f"{text}. Look at its output; start all ranks anew", peer=peer)


@contextmanager
def _collecting(errors: list[TransportError]) -> Iterator[None]:
    try:
        yield
    except TransportError as error:
        errors.append(error)


def _connect(backend: str, store: Store, name: str, rank: int, size: int) -> _Link:
    """A link that only its own ends take part in making.

    Not ``new_group``: that is for all ranks of the program at once or, made by its members alone,
    is named after how many groups a member is in, which differs along a pipeline.
    """
    makers: dict[str, Callable[[Store, int, int], _Link]] = {
        "gloo": dist.ProcessGroupGloo,
        "nccl": getattr(dist, "ProcessGroupNCCL", None),
    }  # pyright: ignore[reportAssignmentType]
    make = makers.get(backend)
    if make is None:
        raise TransportError(f"there are channels for gloo and nccl, but none for {backend!r} yet")
    return make(PrefixStore(name, store), rank, size)
