"""All-gather over plain sockets: every rank gets the numbers of every rank.

Up to four ranks send their numbers to each other directly. More ranks pass on what they have to the
rank 1, 2, 4, … places further, so that all have everything after as many rounds as the number of
ranks has binary digits::

    rank 0  ──►  rank 1      round 1: one rank's numbers
    rank 0  ──►  rank 2      round 2: the numbers of two ranks
    rank 0  ──►  rank 4      round 3: the numbers of four ranks

Not a collective of gloo: if one of its writes fails while another rank's message comes in, two of
its threads deadlock.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from weakref import finalize

from taktline.transport.connect import PeerFailure, connect, events
from taktline.transport.control_plane import Plane
from taktline.transport.frames import Frame
from taktline.transport.verdict import Member

__all__ = ["AllGather"]

_FEW = 4
"""The most ranks that all send their numbers to each other directly."""
_PIECE = 1 << 18
_ERRORS = select.POLLERR | select.POLLHUP | select.POLLNVAL


class AllGather:
    """The sockets of one rank to the ranks that it exchanges numbers with.

    Args:
        plane: the control plane, by which the ranks find each other.
        member: the group of their processes.
        place: the same text on each of these ranks, and for no other group.
        rank: the rank of this process.
        seconds: the timeout of each wait.
    """

    def __init__(self, plane: Plane, member: Member, place: str, rank: int, seconds: float) -> None:
        self._rank, self._size, self._seconds = rank, len(member.processes), seconds
        self._peers = peers_of(rank, self._size)
        self._sockets = connect(
            plane,
            member,
            member.processes,
            place,
            seconds,
            calls={peer: (member.processes[peer], rank) for peer in self._peers if peer < rank},
            awaited=[peer for peer in self._peers if peer > rank],
        )
        finalize(self, _close, self._sockets)
        self._unread = {peer: bytearray() for peer in self._peers}

    def exchange(self, mine: bytes) -> list[Frame]:
        """Send the frame of this rank, and return the frames of all."""
        try:
            return self._exchange(mine)
        except PeerFailure:
            self.shut()  # so that no rank waits for what this one cannot pass on
            raise

    def _exchange(self, mine: bytes) -> list[Frame]:
        rank, size = self._rank, self._size
        frames = {rank: mine}
        if size <= _FEW:
            self._send(dict.fromkeys(self._peers, mine))
            for peer in self._peers:
                (frames[peer],) = self._receive(peer, 1)
        else:
            for step in _steps(size):
                count = min(step, size - step)
                have = [frames[(rank - back) % size] for back in range(count)]
                self._send({(rank + step) % size: b"".join(have)})
                source = (rank - step) % size
                for back, frame in enumerate(self._receive(source, count)):
                    frames[(source - back) % size] = frame
        return [Frame.read(frames[peer]) for peer in range(size)]

    def _send(self, messages: dict[int, bytes]) -> None:
        """Send each message, even if a rank is lost: the others wait for theirs."""
        unsent: dict[int, memoryview] = {}
        failure: PeerFailure | None = None
        for peer, data in messages.items():
            try:
                sent = self._sockets[peer].send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                failure = failure or PeerFailure(peer, str(error))
                continue
            if sent < len(data):
                unsent[peer] = memoryview(data)[sent:]
        if failure is not None:
            raise failure
        while unsent:  # long messages: the others may send as much, which must be read meanwhile
            for peer in self._wait(set(self._sockets), set(unsent)):
                if peer in unsent:
                    with suppress(BlockingIOError):
                        unsent[peer] = unsent[peer][self._sockets[peer].send(unsent[peer]) :]
                        if not unsent[peer]:
                            del unsent[peer]

    def _receive(self, peer: int, count: int) -> list[bytes]:
        """The next frames of a rank."""
        data, found, at = self._unread[peer], [], 0
        while len(found) < count:
            size = Frame.size(data, at, peer)
            if size is None or len(data) - at < size:
                if not self._read(peer):
                    self._wait({peer}, set())
                continue
            found.append(bytes(data[at : at + size]))
            at += size
        del data[:at]
        return found

    def _read(self, peer: int) -> bool:
        """Take what has arrived; returns whether there was anything."""
        try:
            data = self._sockets[peer].recv(_PIECE)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerFailure(peer, str(error)) from error
        if not data:
            raise PeerFailure(peer, "its connection has ended")
        self._unread[peer] += data
        return True

    def _wait(self, readers: set[int], writers: set[int]) -> list[int]:
        """Wait for any of these ranks; read what has arrived, and return those to write to."""
        poll = select.poll()
        peers = {self._sockets[peer].fileno(): peer for peer in readers | writers}
        for number, peer in peers.items():
            reads = select.POLLIN if peer in readers else 0
            poll.register(number, reads | (select.POLLOUT if peer in writers else 0))
        found = events(poll, self._seconds)
        if not found:
            raise PeerFailure(min(readers or writers), "timed out", timed_out=True)
        for number, event in found:
            if event & (select.POLLIN | _ERRORS):
                self._read(peers[number])
        return [peers[number] for number, event in found if event & select.POLLOUT]

    def shut(self) -> None:
        """End every wait, here and at the other ends; from any thread."""
        for connection in list(self._sockets.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _close(sockets: dict[int, socket.socket]) -> None:
    for connection in sockets.values():
        connection.close()


def peers_of(rank: int, size: int) -> list[int]:
    """The ranks with which a rank has connections, by the number of ranks.

    >>> peers_of(0, 4), peers_of(0, 8)
    ([1, 2, 3], [1, 2, 4, 6, 7])
    """
    if size <= _FEW:
        return [peer for peer in range(size) if peer != rank]
    ways = [sign * step for step in _steps(size) for sign in (1, -1)]
    return sorted({(rank + way) % size for way in ways})


def _steps(size: int) -> list[int]:
    """1, 2, 4, … below the number of ranks."""
    return [1 << digit for digit in range((size - 1).bit_length())]
