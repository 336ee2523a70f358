"""Ranks as processes, over torch.distributed: gloo or nccl."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from taktline.errors import (
    LostRankError,
    StageError,
    TaktlineError,
    TransportError,
    text_of,
)
from taktline.transport.base import Channel, Handle, Post
from taktline.transport.control_plane import Member, Plane
from taktline.transport.frames import agreed, framed
from taktline.transport.lanes import Lane, lanes_between
from taktline.transport.sockets import PeerFailure, Sockets
from taktline.transport.verdict import OUTSIDE, Cause, Verdict

__all__ = ["Distributed"]

_CPU = torch.device("cpu")

_NEWS_SECONDS, _LATE_NEWS_SECONDS = 1.0, 0.25
"""How long to wait for the news of why a connection has ended, or a wait has been in vain."""
_FOREIGN_NEWS_SECONDS = 3.0
"""The same where it is not ours: without news, nothing is known but what torch says."""

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


class _Link(Protocol):
    """What a process group and its backends have in common."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> dist.Work: ...


class Distributed:
    """The ranks of a process group, over connections of their own.

    Numbers go over sockets. So do tensors on the CPU, where two ranks have a lane for each kind of
    data. On nccl each channel has a communicator of its own, since one serves both directions of a
    pair in one order.

    They are not those of the group: when a rank is lost, ours are broken, so that nobody waits for
    it, and the program's groups stay as they are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device = _CPU,
        *,
        lanes: bool | None = None,
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
        self._has_lanes = self._backend == "gloo" if lanes is None else lanes
        self._lanes: dict[tuple[int, ...], Sequence[Lane]] = {}
        """By the two ranks."""
        self._links: dict[Channel, _Link] = {}
        """Where there are no lanes."""
        self._sockets: Sockets | None = None
        self._generation = 0
        """How often links were made; the same on every rank."""
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
        self._let_go()

    def _let_go(self) -> None:
        for lane in self._all_lanes():
            lane.shut()  # which ends its threads
        self._sockets, self._links, self._lanes = None, {}, {}

    def _all_lanes(self) -> list[Lane]:
        return [lane for lanes in list(self._lanes.values()) for lane in lanes]

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
            if self._sockets is not None:
                self._sockets.shut()  # who still exchanges numbers must not wait for this rank
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
            self._member.told.wait(_FOREIGN_NEWS_SECONDS)
        if self.verdict is None and not timed_out:
            return None
        return self.first_cause(None, "a collective", timed_out=timed_out)

    @property
    def entangled(self) -> bool:
        """Whether pipelines of this process share their work: with replicas, or in parts."""
        return self.plane is not None and self.plane.entangled

    def entangle(self, error: BaseException) -> None:
        """Let an error say so if what was left half done cannot be repeated."""
        if self.entangled and isinstance(error, TaktlineError):
            error.recoverable = "restart"

    def _error(self, verdict: Verdict) -> TaktlineError:
        """What a verdict means to these ranks."""
        error = verdict.error(self.processes)
        self.entangle(error)
        return error

    def reconnect(self) -> None:
        """Make new links, on every rank; what was under way is lost."""
        if self.plane is not None:
            if gone := [process for process in self.processes if self.plane.gone(process)]:
                raise Verdict(Cause.LOST, gone[0]).error(self.processes)
            self.plane.leave(self._member)
            self._member = Member(self.processes, self._leave)
            self.plane.join(self._member, again_at=self._place)
        self._let_go()
        self.exchange([], "reconnect()")

    def _leave(self, verdict: Verdict) -> None:
        """End every wait for these ranks; on the plane's thread."""
        if self._sockets is not None and not self._still_exchanges(verdict):
            self._sockets.shut()
        for lane in self._all_lanes():
            lane.shut()
        for link in self._links.values():
            abort = getattr(link, "abort", None)
            if self._backend == "nccl" and abort is not None:
                abort()

    def _still_exchanges(self, verdict: Verdict) -> bool:
        """Whether numbers are exchanged as far as they come: the rank has sent all of its own.

        It may have ended by an error that all ranks are just agreeing on. If an exchange needs more
        of it, the end of its sockets says so.
        """
        others = {*self.processes} - {self.processes[self.rank]}
        return verdict.where == OUTSIDE and verdict.process in others

    def _met(self) -> Sockets:
        """The sockets to the other ranks, which all ranks make together."""
        if self.verdict is not None and not (
            self._sockets is not None and self._still_exchanges(self.verdict)
        ):
            raise self._error(self.verdict)
        if self._sockets is None:
            assert self.plane is not None  # there are other ranks
            seconds = self.timeout.total_seconds()
            try:
                made = Sockets(self.plane, self._member, self._place, self.rank, seconds)
                if made.missing:
                    raise self._incomplete(made.missing)
                self._sockets = made  # before its first wait, so that a verdict ends that, too
                mine = framed([self._generation + 1], "connecting")
                self._generation = max(frame.numbers[0] for frame in made.exchange(mine))
            except PeerFailure as error:
                raise self._lost(error, "connecting") from error
        return self._sockets

    def _incomplete(self, missing: Sequence[int]) -> TaktlineError:
        """Why ranks did not come to connect."""
        assert self.plane is not None
        lost = [process for process in missing if self.plane.gone(process)]
        if self.verdict is None and lost:
            self.give_up(Verdict(Cause.LOST, lost[0], "", "before the first step"))
        elif self.verdict is None:
            what = (
                "it to come to the first call; see whether it is running, and whether its host can "
                "be reached: GLOO_SOCKET_IFNAME names the interface to use"
            )
            self.give_up(self.plane.stalled(self.processes, missing, what))
        assert self.verdict is not None  # this rank is one of those whom it concerns
        return self._error(self.verdict)

    def open(self, channels: Sequence[Channel]) -> None:
        """Connect the channels of this rank that are not connected yet."""
        if self.size > 1:
            self._met()
        for channel in channels:
            if self.rank not in (channel.sender, channel.receiver):
                continue
            ends = _ends(channel)
            if self._has_lanes and ends not in self._lanes:
                self._lanes[ends] = self._lanes_between(ends)
            elif not self._has_lanes and channel not in self._links:
                self._links[channel] = self._connect(channel)
                self._greet(channel)

    def _lanes_between(self, ends: tuple[int, ...]) -> Sequence[Lane]:
        """The lanes between this rank and another one, made by both."""
        assert self.plane is not None
        peer = sum(ends) - self.rank
        what = f"messages between rank {self.rank} and rank {peer}"
        return lanes_between(
            self.plane,
            self._member,
            [self.processes[end] for end in ends],
            f"{self._place}/{ends}/{self._generation}",
            self.timeout.total_seconds(),
            lambda timed_out: self.first_cause(peer, what, timed_out=timed_out),
        )

    def _connect(self, channel: Channel) -> _Link:
        """A link, which only its two ends take part in making.

        Not ``new_group``: that is for all ranks of the program at once or, made by its members
        alone, is named after how many groups a member is in, which differs along a pipeline.
        """
        make = {"gloo": _made_by_gloo, "nccl": _made_by_nccl}.get(self._backend)
        if make is None:
            raise TransportError(
                f"there are channels for gloo and nccl, but none for {self._backend!r} yet"
            )
        if self.verdict is not None:
            raise self._error(self.verdict)
        ends = _ends(channel)
        store = PrefixStore(f"{channel}/{self._generation}", self._store)
        try:
            return make(store, ends.index(self.rank), self.timeout)
        except RuntimeError as error:
            peer = sum(ends) - self.rank
            raise self._failed(error, peer, "connecting") from error

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        """What sends a buffer without waiting."""
        if lanes := self._lanes.get(_ends(channel)):
            return lanes[channel.gradients].send
        return self._poster(self._link(channel).send, channel, channel.receiver)

    def receiver(self, channel: Channel) -> Post:
        """What receives into a buffer without waiting."""
        if lanes := self._lanes.get(_ends(channel)):
            return lanes[channel.gradients].receive
        return self._poster(self._link(channel).recv, channel, channel.sender)

    def exchange(
        self, numbers: Sequence[int], what: str = "an exchange", *, ragged: bool = False
    ) -> list[list[int]]:
        """Give every rank the numbers of every rank."""
        if self.size == 1:
            return [list(numbers)]
        sockets = self._met()
        try:
            frames = sockets.exchange(framed(numbers, what))
        except PeerFailure as error:
            raise self._lost(error, what) from error
        agreed(frames, ragged=ragged)
        return [frame.numbers for frame in frames]

    def _greet(self, channel: Channel) -> None:
        """Send one byte: nccl connects at the first message, and waits for the other end to."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        post = self.sender(channel) if channel.sender == self.rank else self.receiver(channel)
        post(byte).wait()

    def _link(self, channel: Channel) -> _Link:
        if channel not in self._links:
            raise TransportError(f"{channel}: rank {self.rank} has not opened this channel")
        return self._links[channel]

    def _poster(
        self,
        post: Callable[[list[torch.Tensor], int, int], dist.Work | None],
        channel: Channel,
        peer: int,
    ) -> Post:
        """What sends or receives buffers on a link."""
        address = _ends(channel).index(peer)

        def posted(buffer: torch.Tensor) -> Handle:
            try:
                work = post([buffer], address, 0)
            except RuntimeError as error:
                raise self._failed(error, peer, channel) from error
            if work is None:
                raise TransportError("the link took a message without giving a handle for it")
            return _Message(work, channel, peer, self._failed)

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

    def _lost(self, failure: PeerFailure, what: str) -> TaktlineError:
        return self.first_cause(failure.peer, what, timed_out=failure.timed_out)

    def first_cause(self, peer: int | None, what: object, *, timed_out: bool) -> TaktlineError:
        """Why a wait for a rank has failed; where nobody knows it yet, all are told."""
        if self.plane is None:
            return LostRankError(f"rank {self.rank} has lost another rank ({what})", peer=peer)
        # A connection may end before the news of why arrive; and if this process was stopped
        # itself, the others have long said so.
        self._member.told.wait(_LATE_NEWS_SECONDS if timed_out else _NEWS_SECONDS)
        if self.verdict is None:
            awaited = [] if peer is None else [self.processes[peer]]
            if timed_out:
                found = self.plane.stalled(self.processes, awaited, str(what))
            elif awaited:
                cause = Cause.CUT if self.plane.news.lives(awaited[0]) else Cause.LOST
                found = Verdict(cause, awaited[0], f"rank {self.plane.process}", f"({what})")
            else:
                found = Verdict(Cause.RAISED, self.plane.process, "a lost connection", str(what))
            self.give_up(found)
        verdict = self.verdict
        assert verdict is not None  # this rank is one of those whom it concerns
        return self._error(verdict)


def _ends(channel: Channel) -> tuple[int, ...]:
    """The two ranks of a channel, the lower one first."""
    return tuple(sorted((channel.sender, channel.receiver)))


def _made_by_nccl(store: Store, rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def _made_by_gloo(store: Store, rank: int, timeout: timedelta) -> Any:
    """As by nccl, for whoever has no GPU to try that on."""
    return dist.ProcessGroupGloo(store, rank, 2, timeout)


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
