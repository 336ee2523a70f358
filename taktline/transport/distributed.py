"""Ranks as processes, over torch.distributed: gloo or nccl."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from taktline.errors import (
    LostRankError,
    StageError,
    StallError,
    TaktlineError,
    TransportError,
    text_of,
)
from taktline.transport import gloo
from taktline.transport.base import Channel, Handle, Post
from taktline.transport.frames import FRAME, Frame, agreed, framed
from taktline.transport.plane import Member, Plane
from taktline.transport.verdict import Cause, Verdict

__all__ = ["Distributed"]

_CPU = torch.device("cpu")

_TAG = 0x7A4B
"""Keeps the channels' messages apart from others that a program sends over the same group."""

_FEW = 4
"""Up to so many ranks, each sends its numbers to each other one: half the time of a collective."""

_NEWS_SECONDS = 1.0
"""How long to wait for the news of why a connection has ended."""

_Failed: TypeAlias = Callable[[RuntimeError, int | None, object], TaktlineError]

_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, Distributed]] = WeakKeyDictionary()
"""By group and type of device."""

_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many transports this process has made for a group; as many as all others have."""

_LOST = re.compile(
    r"connection|connect |socket|broken pipe|remote process|pair\.cc|network|communicator|aborted",
    re.IGNORECASE,
)
"""What gloo and nccl say when the other end is gone; all else has other reasons."""


_MAKERS: dict[str, Callable[[Store, int, int, timedelta], Any]] = {
    "gloo": dist.ProcessGroupGloo,
    "nccl": lambda store, rank, size, timeout: _nccl(store, rank, size, timeout),
}


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


class _Link(Protocol):
    """What a process group and its backends have in common."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> dist.Work: ...


class Distributed:
    """The ranks of a process group, over links of their own.

    On gloo a channel is a tag. On nccl, where one communicator serves both directions of a pair in
    one order, it has a communicator of its own; and the small exchanges, which live on the CPU, go
    over gloo beside it.

    The links are not those of the group: when a rank is lost, ours are broken, so that nobody waits
    for it, and the program's groups stay as they are. They are made when they are first used.
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
        self.processes = dist.get_process_group_ranks(group)
        """The number of each rank among all processes of the job."""
        self.timeout: timedelta = timeout_of(group)
        """After how long a wait for another rank is given up."""
        self.plane = Plane.current()
        # Weak, so that a group that the program has dropped is not kept by what is known of it.
        self._weak_group = ref(group)
        self._backend = _backend(group, device)
        self._group_per_channel = (
            self._backend != "gloo" if group_per_channel is None else group_per_channel
        )
        self._links: dict[Channel, _Link] = {}
        self._gloo: Any = None
        self._sockets: gloo.Sockets = {}
        self._generation = 0
        _made[group] = _made.get(group, 0) + 1
        # Restarted processes may find the addresses of their forerunners in the same store.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"taktline/{restart}/{_made[group]}", group.get_group_store())
        self._place = f"{self.processes}/{device.type}/{_made[group]}"
        self._member = Member(self.processes, self._leave)
        if self.plane is not None:
            self.plane.join(self._member)

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device = _CPU) -> Distributed:
        """The transport of a group for a type of device, made once."""
        known = _known.setdefault(group, {})
        if device.type not in known:
            known[device.type] = cls(group, device)
        return known[device.type]

    @classmethod
    def forget(cls, group: dist.ProcessGroup) -> None:
        """Let go of the links of a group that ends."""
        for transport in _known.pop(group, {}).values():
            transport.close()

    def close(self) -> None:
        """Let go of the links."""
        if self.plane is not None:
            self.plane.leave(self._member)
        self._gloo, self._links, self._sockets = None, {}, {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, which somebody else keeps."""
        found = self._weak_group()
        if found is None:
            raise TransportError("the process group is gone; make the stages anew with a new one")
        return found

    @property
    def verdict(self) -> Verdict | None:
        """Why these ranks cannot go on together; None if they can."""
        return self._member.verdict

    def give_up(self, verdict: Verdict) -> None:
        """Leave these ranks behind, and tell them why."""
        if self.plane is not None:
            self.plane.announce(verdict)

    def raised(self, error: BaseException, where: str = "") -> None:
        """Tell the others that this rank leaves them behind, unless they have a reason already."""
        if self.verdict is not None:
            return
        text = f"{type(error).__name__}: {text_of(error, 4000)}".removesuffix(": ")
        fields = None
        if type(error) is StageError:
            names = ("rank", "stage", "microbatch", "action")
            fields = {name: getattr(error, name) for name in names}
            fields["reason"] = text_of(error.reason, 4000)
        self.give_up(Verdict(Cause.RAISED, self.processes[self.rank], text, where, fields))

    def explain(self, error: BaseException) -> TaktlineError | None:
        """The first cause of an error in another group's wait; None if it has its own."""
        if not isinstance(error, RuntimeError) or isinstance(error, TransportError):
            return None
        text = str(error).lower()
        timed_out, lost = "timed out" in text or "timeout" in text, bool(_LOST.search(text))
        if lost and not timed_out:
            self._member.told.wait(_NEWS_SECONDS)
        if self.verdict is None and not timed_out:
            return None
        return self.first_cause(None, "a collective", timed_out=timed_out)

    def interrupt(self) -> None:
        """End what this rank waits for; called from another thread."""
        gloo.shut(self._sockets)

    def reconnect(self) -> None:
        """Make new links, on every rank; what was under way is lost."""
        if self.plane is not None:
            if gone := [process for process in self.processes if self.plane.gone(process)]:
                raise Verdict(Cause.LOST, gone[0]).error(self.processes)
            self.plane.leave(self._member)
            self._member = Member(self.processes, self._leave)
            self.plane.join(self._member)
        self._gloo, self._links, self._sockets = None, {}, {}
        self._link()

    def _leave(self, verdict: Verdict) -> None:
        """End every wait for these ranks; on the plane's thread."""
        gloo.shut(self._sockets)
        for link in self._links.values():
            abort = getattr(link, "abort", None)
            if self._backend == "nccl" and abort is not None:
                abort()

    def _link(self) -> Any:
        """The link of all ranks, over gloo; made by all of them together."""
        if self.verdict is not None:
            raise self.verdict.error(self.processes)
        if self._gloo is None:
            self._generation += 1
            name = f"all/{self._generation}"
            self._meet(name)
            self._gloo = self._connect("gloo", name, self.rank, self.size)
            gloo.calm_gloo()
        return self._gloo

    def _meet(self, name: str) -> None:
        """Make sure that every rank comes to make a link: in gloo, nobody could leave the wait."""
        if self.plane is None:
            return
        place = f"{self._place}/{name}"
        missing = self.plane.meet(self._member, place, self.timeout.total_seconds())
        if self.verdict is not None:
            raise self.verdict.error(self.processes)
        lost = [process for process in self.processes if self.plane.gone(process)]
        if lost:
            raise Verdict(Cause.LOST, lost[0], "", "before the first step").error(self.processes)
        if missing:
            what = (
                "it to come to the first call; see whether it is running, and whether its host can "
                "be reached: GLOO_SOCKET_IFNAME names the interface to use"
            )
            where = f"(rank {self.plane.process} waits for {what})"
            report = self.plane.report(self.processes)
            self.give_up(Verdict(Cause.STALLED, missing[0], report, where))
            raise self.verdict.error(self.processes) if self.verdict else StallError(what)

    def _connect(self, backend: str, name: str, rank: int, size: int) -> Any:
        """A link that only its own ends take part in making.

        Not ``new_group``: that is for all ranks of the program at once or, made by its members
        alone, is named after how many groups a member is in, which differs along a pipeline.
        """
        make = _MAKERS.get(backend)
        if make is None:
            raise TransportError(
                f"there are channels for gloo and nccl, but none for {backend!r} yet"
            )
        store = PrefixStore(name, self._store)
        try:
            if backend != "gloo":
                return make(store, rank, size, self.timeout)
            link, found = gloo.made_by(lambda: make(store, rank, size, self.timeout), size - 1)
        except RuntimeError as error:
            raise self._failed(error, None, "connecting") from error
        self._sockets |= found
        return link

    def open(self, channels: Sequence[Channel]) -> None:
        """Connect those channels of this rank that have a link of their own, and none yet."""
        if not self._group_per_channel:
            return
        for channel in channels:
            ends = (channel.sender, channel.receiver)
            if self.rank in ends and channel not in self._links:
                name, end = f"{channel}/{self._generation}", ends.index(self.rank)
                self._links[channel] = self._connect(self._backend, name, end, 2)
                self._greet(channel)

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        """What sends a buffer without waiting."""
        group, peer, tag = self._route(channel, channel.receiver)
        # The group's own method: torch.distributed.isend takes twice the time of a small message.
        return self._poster(group.send, channel, channel.receiver, peer, tag)

    def receiver(self, channel: Channel) -> Post:
        """What receives into a buffer without waiting."""
        group, peer, tag = self._route(channel, channel.sender)
        return self._poster(group.recv, channel, channel.sender, peer, tag)

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
        control = self._link()
        if self.size > _FEW:
            padded = torch.zeros(max(sizes), dtype=torch.int64, device=_CPU)
            padded[: len(mine)] = mine
            everyone = torch.empty(self.size, max(sizes), dtype=torch.int64, device=_CPU)
            try:
                control._allgather_base(everyone.view(-1), padded).wait()
            except RuntimeError as error:
                raise self._failed(error, None, what) from error
            return [row[:size] for row, size in zip(everyone, sizes, strict=True)]
        arrived = [torch.empty(size, dtype=torch.int64, device=_CPU) for size in sizes]
        arrived[self.rank] = mine
        errors: list[TaktlineError] = []
        handles: list[Handle] = []
        for peer in range(self.size):
            if peer != self.rank:
                for post, data in ((control.recv, arrived[peer]), (control.send, mine)):
                    send = self._poster(post, what, peer, peer, _TAG + 2)
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
        return self._link(), peer, _TAG + channel.gradients

    def _poster(
        self,
        post: Callable[[list[torch.Tensor], int, int], dist.Work | None],
        what: object,
        peer: int,
        address: int,
        tag: int,
    ) -> Post:
        """What sends or receives buffers; ``address`` is the peer's rank on the link."""

        def posted(buffer: torch.Tensor) -> Handle:
            try:
                work = post([buffer], address, tag)
            except RuntimeError as error:
                raise self._failed(error, peer, what) from error
            if work is None:
                raise TransportError("the link took a message without giving a handle for it")
            return _Message(work, what, peer, self._failed)

        return posted

    def _failed(self, error: RuntimeError, peer: int | None, what: object) -> TaktlineError:
        """What became of a message: by the first cause, if these ranks have a verdict."""
        text = str(error)
        timed_out = "timed out" in text.lower() or "timeout" in text.lower()
        lost = isinstance(error, dist.DistNetworkError) or _LOST.search(text) is not None
        if not timed_out and not lost and self.verdict is None:
            who = "another rank" if peer is None else f"rank {peer}"
            return TransportError(f"rank {self.rank} cannot talk to {who} ({what}): {error}")
        return self.first_cause(peer, what, timed_out=timed_out)

    def first_cause(self, peer: int | None, what: object, *, timed_out: bool) -> TaktlineError:
        """Why a wait for a rank has failed; where nobody knows it yet, all are told."""
        if self.plane is None:
            return LostRankError(f"rank {self.rank} has lost another rank ({what})", peer=peer)
        if not timed_out:
            self._member.told.wait(_NEWS_SECONDS)  # gloo may be quicker than the news
        if self.verdict is None:
            process = None if peer is None else self.processes[peer]
            if timed_out:
                found = self.plane.stalled(self.processes, process, str(what))
            elif process is None:
                found = Verdict(Cause.RAISED, self.plane.process, "a lost connection", str(what))
            else:
                found = Verdict(Cause.LOST, process, where=f"({what})")
            self.give_up(found)
        verdict = self.verdict
        assert verdict is not None  # this rank is one of those whom it concerns
        return verdict.error(self.processes)


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


class _Message:
    """A message under way; if it fails, its handle tells why."""

    __slots__ = ("_failed", "_peer", "_what", "_work")

    def __init__(self, work: dist.Work, what: object, peer: int, failed: _Failed) -> None:
        self._work = work
        self._what = what
        self._peer = peer
        self._failed = failed

    def wait(self) -> object:
        """Return once the buffer may be used."""
        try:
            return self._work.wait()
        except RuntimeError as error:
            raise self._failed(error, self._peer, self._what) from error


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """After how long a wait in a group is given up."""
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=30)


@contextmanager
def _collecting(errors: list[TaktlineError]) -> Iterator[None]:
    try:
        yield
    except TaktlineError as error:
        errors.append(error)
