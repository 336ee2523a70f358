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

from functools import partial

import torch

from taktline.transport.base import Handle
from taktline.transport.connect import PeerFailure, connect
from taktline.transport.control_plane import Plane
from taktline.transport.frames import Frame
from taktline.transport.lanes import Lane
from taktline.transport.verdict import Member

_FEW = 4
"""The most ranks that all send their numbers to each other directly."""
_NOTHING = torch.empty(0)
"""Frames go as the marks of a message, without a tensor."""


class AllGather:
    """The lanes of one rank to the ranks that it exchanges numbers with.

    Args:
        plane: the control plane, by which the ranks find each other.
        member: the group of their processes.
        place: the same text on each of these ranks, and for no other group.
        rank: the rank of this process.
        seconds: the timeout of each wait.
    """

    def __init__(self, plane: Plane, member: Member, place: str, rank: int, seconds: float) -> None:
        self._rank, self._size = rank, len(member.processes)
        self._rounds = _rounds(self._size)
        everyone = member.processes
        peers = {peer: everyone[peer] for peer in _peers_of(rank, self._size)}
        sockets = connect(plane, member, everyone, place, seconds, peers=peers.values())
        self._lanes = {
            peer: Lane(sockets[process][0], seconds, partial(PeerFailure, [process]))
            for peer, process in peers.items()
        }
        self._unread = {peer: bytearray() for peer in peers}

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
        return [Frame.read(frames[peer]) for peer in range(size)]

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
            size = Frame.size(data, at, peer)
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
