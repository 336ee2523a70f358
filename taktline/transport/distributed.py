"""Ranks as processes, over torch.distributed: gloo or nccl."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from taktline.errors import (
    LostRankError,
    StageError,
    TaktlineError,
    TransportError,
    text_of,
)
from taktline.transport.base import Channel, Post
from taktline.transport.control_plane import Plane
from taktline.transport.frames import agreed, framed
from taktline.transport.lanes import Lane, lanes_between
from taktline.transport.links import Link, backend_of, ends_of, symptoms_of, timeout_of
from taktline.transport.member import Member
from taktline.transport.sockets import PeerFailure, Sockets
from taktline.transport.verdict import OUTSIDE, Cause, Verdict

__all__ = ["Distributed"]

_CPU = torch.device("cpu")

_NEWS_SECONDS, _LATE_NEWS_SECONDS = 1.0, 0.25
"""How long to wait for the news of why a connection has ended, or a wait has been in vain."""
_FOREIGN_NEWS_SECONDS = 3.0
"""The same where it is not ours: without news, nothing is known but what torch says."""

_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, Distributed]] = WeakKeyDictionary()
"""By group and type of device."""

_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many transports this process has made for a group; as many as all others have."""


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
        self._backend = backend_of(group, device)
        self._has_lanes = self._backend == "gloo" if lanes is None else lanes
        self._lanes: dict[tuple[int, ...], Sequence[Lane]] = {}
        """By the two ranks."""
        self._links: dict[Channel, Link] = {}
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
        timed_out, lost = symptoms_of(error)
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
        for connection in (*self._all_lanes(), *self._links.values()):
            connection.shut()

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
            ends = ends_of(channel)
            if self._has_lanes and ends not in self._lanes:
                self._lanes[ends] = self._lanes_between(ends)
            elif not self._has_lanes and channel not in self._links:
                self._links[channel] = self._link(channel)
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

    def _link(self, channel: Channel) -> Link:
        """A link for a channel of this rank, which its other end makes, too."""
        if self.verdict is not None:
            raise self._error(self.verdict)
        store = PrefixStore(f"{channel}/{self._generation}", self._store)
        return Link.connect(self._backend, store, channel, self.rank, self.timeout, self._failed)

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        """What sends a buffer without waiting."""
        return self._opened(channel).send

    def receiver(self, channel: Channel) -> Post:
        """What receives into a buffer without waiting."""
        return self._opened(channel).receive

    def _opened(self, channel: Channel) -> Lane | Link:
        if lanes := self._lanes.get(ends_of(channel)):
            return lanes[channel.gradients]
        if channel not in self._links:
            raise TransportError(f"{channel}: rank {self.rank} has not opened this channel")
        return self._links[channel]

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

    def _failed(self, error: RuntimeError, peer: int | None, what: object) -> TaktlineError:
        """What became of a message: by the first cause, if these ranks have a verdict."""
        timed_out, lost = symptoms_of(error)
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
