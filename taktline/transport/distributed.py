"""Ranks as processes, over torch.distributed: gloo or nccl.

Exchanges go over plain sockets. Up to four ranks send their data to each other directly. More ranks
pass on what they have to the rank 1, 2, 4, … places further, so that all have everything after as
many rounds as the number of ranks has binary digits::

    rank 0  ──►  rank 1      round 1: one rank's data
    rank 0  ──►  rank 2      round 2: the data of two ranks
    rank 0  ──►  rank 4      round 3: the data of four ranks

Not a collective of gloo: if one of its writes fails while another rank's message comes in, two of
its threads deadlock.

What a rank sends is a frame. Its purpose is in it, so that a mix-up can be reported::

    byte 0     version of this format, with a mark
    byte 8     how many bytes of data there are
    byte 16    the purpose of the exchange, a text of up to 48 bytes
    byte 64    the data
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from errno import ECONNABORTED, ECONNRESET
from functools import partial
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from taktline.errors import StageError, TaktlineError, TransportError, text_of
from taktline.transport.base import Channel, Frame, Handle, Post, Transport
from taktline.transport.communicators import (
    Communicator,
    backend_of,
    ends_of,
    name_of,
    symptoms_of,
    timeout_of,
)
from taktline.transport.control_plane import Member, PeerFailure, Plane
from taktline.transport.exchange import written
from taktline.transport.exit_hooks import store_name
from taktline.transport.lanes import Lane
from taktline.transport.news import OUTSIDE, Cause, Verdict

_CPU = torch.device("cpu")
_NOTHING = torch.empty(0)
"""Frames go as the marks of a message, without a tensor."""
_FEW = 4
"""The most ranks that all send their numbers to each other directly."""
_MARK = 0x7A4B74616B740003
"""The last two bytes are the version."""
_HEAD = struct.Struct("<2q48s")
_MOST = 1 << 27
"""More bytes than an exchange takes."""

_NEWS_SECONDS, _LATE_NEWS_SECONDS = 1.6, 0.25
"""How long to wait for the verdict when a connection has ended, or a wait has timed out."""
_FOREIGN_NEWS_SECONDS = 3.0
"""The same for a connection of torch: without a verdict, only its own error is known."""

_COMING = (
    "it to come to the first call; see whether it is running, and whether its host can be reached: "
    "GLOO_SOCKET_IFNAME names the interface to use"
)
"""What a rank waits for while the ranks connect."""

_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, Distributed]] = WeakKeyDictionary()
"""By group and type of device."""

_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many transports this process has made for a group; all processes make equally many."""


def packed(frame: Frame) -> bytes:
    """The bytes of a frame."""
    what, data = frame
    if len(data) > _MOST:
        raise TransportError(f"{what} takes {len(data):,} bytes; at most {_MOST:,} can be shared")
    return _HEAD.pack(_MARK, len(data), what.encode()[:48]) + data


def size_of(data: bytes | bytearray, at: int, rank: int) -> int | None:
    """The number of bytes of a rank's frame at an offset; None if its head is not complete."""
    if len(data) - at < _HEAD.size:
        return None
    mark, size, _ = _HEAD.unpack_from(data, at)
    if mark != _MARK:
        raise TransportError(
            f"rank {rank} has sent no message of an exchange, or one of another version; "
            "install the same version of Taktline on every rank"
        )
    if not 0 <= size <= _MOST:
        raise TransportError(f"rank {rank} announces {size:,} bytes, more than there can be")
    return _HEAD.size + size


def unpacked(data: bytes) -> Frame:
    """The frame in these bytes, which are all of it."""
    what = _HEAD.unpack_from(data)[2]
    return Frame(what.rstrip(b"\0").decode(errors="replace"), data[_HEAD.size :])


class AllGather:
    """The lanes of one rank to the ranks that it exchanges numbers with.

    Args:
        plane: the control plane, by which the ranks connect.
        member: the group of their processes, which have met.
        rank: the rank of this process.
        seconds: the timeout of each wait.
    """

    def __init__(self, plane: Plane, member: Member, rank: int, seconds: float) -> None:
        self._rank, self._size = rank, len(member.processes)
        self._rounds = _rounds(self._size)
        self._lanes: dict[int, Lane] = {}
        for peer in _peers_of(rank, self._size):
            process = member.processes[peer]
            connection = plane.connect(member, process, "numbers", seconds)
            self._lanes[peer] = Lane(connection, seconds, partial(PeerFailure, [process]))
        self._unread = {peer: bytearray() for peer in self._lanes}

    def exchange(self, mine: Frame) -> list[Frame]:
        """Send the frame of this rank, and return the frames of all."""
        try:
            return [unpacked(frame) for frame in self._exchange(packed(mine))]
        except PeerFailure:
            self.shut()  # so that no rank waits for what this one cannot pass on
            raise

    def _exchange(self, mine: bytes) -> list[bytes]:
        rank, size = self._rank, self._size
        frames = {rank: mine}
        for ways in self._rounds:
            messages = {
                (rank + way) % size: b"".join(frames[(rank - back) % size] for back in range(count))
                for way, count in ways
            }
            leaving = self._send(messages)
            for way, count in ways:
                source = (rank - way) % size
                for back, frame in enumerate(self._receive(source, count)):
                    frames[(source - back) % size] = frame
            for message in leaving:
                message.wait()
        return [frames[peer] for peer in range(size)]

    def _send(self, messages: dict[int, bytes]) -> list[Handle]:
        """Send each message, even if a rank is lost: the others wait for theirs."""
        leaving: list[Handle] = []
        failures: list[PeerFailure] = []
        for peer, data in messages.items():
            try:
                leaving.append(self._lanes[peer].send(_NOTHING, data))
            except PeerFailure as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
        return leaving

    def _receive(self, peer: int, count: int) -> list[bytes]:
        """The next frames of a rank."""
        data, found, at = self._unread[peer], [], 0
        while len(found) < count:
            size = size_of(data, at, peer)
            if size is None or len(data) - at < size:
                data += self._lanes[peer].take()
                continue
            found.append(bytes(data[at : at + size]))
            at += size
        del data[:at]
        return found

    def shut(self) -> None:
        """End every wait, here and at the other ends; from any thread."""
        for lane in self._lanes.values():
            lane.shut()


def _peers_of(rank: int, size: int) -> list[int]:
    """The ranks with which a rank has connections, by the number of ranks.

    >>> _peers_of(0, 4), _peers_of(0, 8)
    ([1, 2, 3], [1, 2, 4, 6, 7])
    """
    ways = {way for ways in _rounds(size) for way, _ in ways}
    return sorted({(rank + sign * way) % size for way in ways for sign in (1, -1)})


def _rounds(size: int) -> list[list[tuple[int, int]]]:
    """For each round, how much further a rank sends, and the frames of how many ranks.

    >>> _rounds(3), _rounds(6)
    ([[(1, 1), (2, 1)]], [[(1, 1)], [(2, 2)], [(4, 2)]])
    """
    if size <= _FEW:
        return [[(way, 1) for way in range(1, size)]]
    ways = [1 << digit for digit in range((size - 1).bit_length())]
    return [[(way, min(way, size - way))] for way in ways]


def _was_cut_off(error: BaseException | None) -> bool:
    """Whether a connection has broken by itself: its other end has not hung up."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (ECONNRESET, ECONNABORTED):
            return True
        error = error.__cause__
    return False


class Distributed(Transport):
    """The ranks of a process group, two or more, over connections of our own.

    Numbers go over sockets. So do tensors on the CPU, where two ranks have a lane for each kind of
    data. On nccl each channel has a communicator of its own, since one communicator serves both
    directions of a pair in one order.

    The connections of the group itself stay as they are: when a rank is lost, only ours are broken,
    so that no rank waits for it.
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
        self.timeout: timedelta = timeout_of(group)
        """After how long a wait for another rank is given up."""
        self.plane = Plane.current()
        self.processes = [self.plane.numbers[each] for each in dist.get_process_group_ranks(group)]
        """The number of each rank among all processes of the job."""
        # Weak, so that a group that the program has dropped is not kept alive.
        self._weak_group = ref(group)
        self._backend = backend_of(group, device)
        self._has_lanes = self._backend == "gloo" if lanes is None else lanes
        self._connections: dict[Channel, Lane | Communicator] = {}
        self._all_gather: AllGather | None = None
        _made[group] = _made.get(group, 0) + 1
        world = f"{self.processes}/{self.plane.generation}"
        name = f"{world}/{name_of(group)}/{device.type}/{_made[group]}"
        self._member = Member(self.processes, name, self._leave)
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
        """Close the connections of a group that ends."""
        for transport in _known.pop(group, {}).values():
            transport.close()

    @classmethod
    def forget_all(cls) -> None:
        """Close the connections of all groups."""
        for group in list(_known):
            cls.forget(group)

    def close(self) -> None:
        """Close the connections."""
        self.plane.leave(self._member)
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in self._connections.values():
            if isinstance(connection, Lane):
                connection.shut()  # which ends its threads
        self._all_gather, self._connections = None, {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which the program keeps."""
        found = self._weak_group()
        if found is None:
            raise TransportError("the process group is gone; recreate the stages with a new one")
        return found

    @property
    def verdict(self) -> Verdict | None:
        """Why these ranks cannot go on together; None if they can."""
        return self._member.verdict

    def give_up(self, verdict: Verdict) -> None:
        """Leave these ranks, and announce why."""
        self.plane.announce(verdict)

    def raised(self, error: BaseException, where: str = "") -> None:
        """Announce that this rank leaves the others by an error, unless there is a verdict."""
        if self.verdict is not None:
            if self._all_gather is not None:
                self._all_gather.shut()  # ranks that still exchange must not wait for this one
            return
        text = f"{type(error).__name__}: {text_of(error, 4000)}".removesuffix(": ")
        stage_error = written(error, 4000) if type(error) is StageError else ""
        self.give_up(Verdict(Cause.RAISED, self.plane.process, text, where, stage_error))

    def explain(self, error: BaseException) -> TaktlineError | None:
        """The first cause of an error in another group's wait; None if it is not a lost rank."""
        if not isinstance(error, RuntimeError) or isinstance(error, TransportError):
            return None
        timed_out, lost = symptoms_of(error)
        if lost and not timed_out:
            self._member.heard.wait(_FOREIGN_NEWS_SECONDS)
        if self.verdict is None and not timed_out:
            return None
        return self._first_cause((), "a collective", timed_out)

    def mark(self, error: BaseException) -> None:
        """Mark an error as one that needs a restart if pipelines share their work."""
        if self.plane.in_company and isinstance(error, TaktlineError):
            error.recoverable = "restart"

    def _error(self, verdict: Verdict) -> TaktlineError:
        """The error to raise for a verdict."""
        error = verdict.error(self.processes)
        self.mark(error)
        return error

    def reconnect(self) -> None:
        """Make new connections, on every rank; messages under way are lost."""
        if gone := [process for process in self.processes if process in self.plane.news.gone]:
            raise Verdict(Cause.LOST, gone[0]).error(self.processes)
        self._disconnect()
        self.plane.join(self._member)
        try:
            self.exchange([], "reconnect()")
        except BaseException as error:  # such as Ctrl-C
            self.raised(error)
            raise

    def _leave(self, verdict: Verdict) -> None:
        """End every wait for these ranks; on the control thread."""
        if self._all_gather is not None and not self._still_exchanges(verdict):
            self._all_gather.shut()
        for connection in list(self._connections.values()):
            connection.shut()

    def _still_exchanges(self, verdict: Verdict) -> bool:
        """Whether numbers may still be exchanged, as the failed rank has sent all of its own.

        It may have ended by an error on which all ranks are just agreeing. If an exchange needs
        more of that rank, the end of its sockets fails the exchange.
        """
        others = {*self.processes} - {self.processes[self.rank]}
        return verdict.where == OUTSIDE and verdict.process in others

    def _met(self) -> AllGather:
        """The sockets for numbers, which all ranks connect together."""
        if self.verdict is not None and not (
            self._all_gather is not None and self._still_exchanges(self.verdict)
        ):
            raise self._error(self.verdict)
        if self._all_gather is None:
            seconds = self.timeout.total_seconds()
            try:
                self.plane.meet(self._member, seconds)
                self._all_gather = AllGather(self.plane, self._member, self.rank, seconds)
            except PeerFailure as failure:
                what = _COMING if failure.timed_out else "connecting"
                raise self._lost(failure, what) from failure
            if self.verdict is not None:  # it has come meanwhile
                raise self._error(self.verdict)
        return self._all_gather

    def open(self, channels: Sequence[Channel]) -> None:
        """Connect the channels of this rank that are not connected yet."""
        self._met()
        mine = (c for c in channels if self.rank in (c.sender, c.receiver))
        new = [channel for channel in mine if channel not in self._connections]
        if self._has_lanes:
            for channel in {ends_of(channel): channel for channel in new}.values():
                self._connect_lanes(channel)
        elif new:
            # Those of nccl at the same time, as each takes long. A thread that waits for the store
            # holds up the others; in nccl only higher ranks wait, so that no two wait for each
            # other. The bytes are made here, where the device of this thread is the current one.
            greetings = torch.zeros(len(new), 1, dtype=torch.uint8, device=self.device)
            count = len(new) if self._backend == "nccl" else 1
            with ThreadPoolExecutor(count, "taktline connect") as pool:
                for _ in pool.map(self._connect, new, greetings):
                    pass  # raises its error

    def connect(self, process: int, what: str) -> socket.socket:
        """A socket to another process, which calls this, too, with the same text; waits block."""
        self._met()
        seconds = self.timeout.total_seconds()
        try:
            found = self.plane.connect(self._member, process, what, seconds)
        except PeerFailure as failure:
            raise self._lost(failure, what) from failure
        found.settimeout(seconds)
        return found

    def broken(self, what: str) -> TaktlineError:
        """The error for a connection that has ended, by the first cause."""
        return self._first_cause((), what, False)

    def _connect_lanes(self, channel: Channel) -> None:
        """Connect this rank and another one by lanes, for every channel between them."""
        ends = ends_of(channel)
        peer, seconds = sum(ends) - self.rank, self.timeout.total_seconds()
        process = self.processes[peer]

        def lost(timed_out: bool) -> TaktlineError:
            what = f"messages between rank {self.rank} and rank {peer}"
            return self._first_cause([process], what, timed_out)

        for gradients in (False, True):
            try:
                found = self.plane.connect(self._member, process, f"lane {gradients}", seconds)
            except PeerFailure as failure:
                raise lost(failure.timed_out) from failure
            lane = Lane(found, seconds, lost)
            for sender, receiver in (ends, ends[::-1]):
                self._connections[Channel(sender, receiver, gradients)] = lane

    def _connect(self, channel: Channel, byte: torch.Tensor) -> None:
        """Make the communicator of a channel, which both of its ranks do.

        Send one byte: nccl connects at the first message, and waits for the other end.
        """
        if self.verdict is not None:
            raise self._error(self.verdict)
        # Restarted processes may find what their forerunners have left in the same store.
        name = f"{store_name()}/{self._member.meeting}/{channel}"
        store = PrefixStore(name, self.group.get_group_store())
        peer = sum(ends_of(channel)) - self.rank
        self._connections[channel] = Communicator.connect(
            self._backend,
            store,
            ends_of(channel).index(peer),
            self.timeout,
            lambda error: self._failed(error, peer, channel),
        )
        post = self.sender(channel) if channel.sender == self.rank else self.receiver(channel)
        post(byte).wait()

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        connection = self._opened(channel)
        # What is sent eagerly is never captured, so that a device may be asked about it.
        asks = eager and isinstance(connection, Communicator)
        return partial(connection.send, asks=True) if asks else connection.send

    def receiver(self, channel: Channel) -> Post:
        return self._opened(channel).receive

    def _opened(self, channel: Channel) -> Lane | Communicator:
        if channel not in self._connections:
            raise TransportError(f"{channel}: rank {self.rank} has not opened this channel")
        return self._connections[channel]

    def _gather(self, mine: Frame) -> list[Frame]:
        all_gather = self._met()
        try:
            return all_gather.exchange(mine)
        except PeerFailure as failure:
            raise self._lost(failure, mine.what) from failure

    def _failed(self, error: RuntimeError, peer: int, what: object) -> TaktlineError:
        """The error for a message that failed: by the first cause, if there is a verdict."""
        timed_out, lost = symptoms_of(error)
        if not timed_out and not lost and self.verdict is None:
            return TransportError(f"rank {self.rank} cannot talk to rank {peer} ({what}): {error}")
        return self._first_cause([self.processes[peer]], what, timed_out, error)

    def _lost(self, failure: PeerFailure, what: str) -> TaktlineError:
        return self._first_cause(failure.processes, what, failure.timed_out, failure)

    def _first_cause(
        self,
        awaited: Sequence[int],
        what: object,
        timed_out: bool,
        error: BaseException | None = None,
    ) -> TaktlineError:
        """The error for a wait for processes; without a verdict, this rank announces one."""
        # A connection may end before the verdict arrives; and if this process was stopped itself,
        # the others have announced that long ago. A peer that has hung up itself may have been cut
        # off from another one, and announces that first.
        seconds = _NEWS_SECONDS + (0 if _was_cut_off(error) else _LATE_NEWS_SECONDS)
        self._member.heard.wait(_LATE_NEWS_SECONDS if timed_out else seconds)
        if self.verdict is None:
            if timed_out:
                found = self.plane.stalled(self.processes, awaited, str(what))
            elif awaited:
                suspect = next((p for p in awaited if p in self.plane.news.gone), awaited[0])
                cause = Cause.CUT if self.plane.lives(suspect) else Cause.LOST
                found = Verdict(cause, suspect, f"rank {self.plane.process}", f"({what})")
            else:
                found = Verdict(Cause.RAISED, self.plane.process, "a lost connection", str(what))
            self.give_up(found)
        verdict = self.verdict
        assert verdict is not None  # it concerns this rank
        return self._error(verdict)
