"""All-gather over plain sockets: every rank gets the numbers of every rank.

Up to four ranks send their numbers to each other directly. More ranks pass on what they have to the
rank 1, 2, 4, … places further, so that all have everything after as many rounds as the number of
ranks has binary digits::

    rank 0  ──►  rank 1      round 1: one rank's numbers
    rank 0  ──►  rank 2      round 2: the numbers of two ranks
    rank 0  ──►  rank 4      round 3: the numbers of four ranks

Not a collective of gloo: if one of its writes fails while another rank's message comes in, two of
its threads deadlock.

What a rank sends is a frame. Its purpose is in it, so that a mix-up can be reported::

    word 0     version of this format, with a mark
    word 1     how many numbers there are
    word 2 …   the purpose of the exchange, a text of up to 48 bytes
    word 8 …   the numbers
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from taktline.errors import MismatchError, TransportError
from taktline.text import by_rank
from taktline.transport.base import Handle
from taktline.transport.control_plane import PeerFailure, Plane
from taktline.transport.lanes import Lane
from taktline.transport.verdict import Member

_FEW = 4
"""The most ranks that all send their numbers to each other directly."""
_NOTHING = torch.empty(0)
"""Frames go as the marks of a message, without a tensor."""
_MARK = 0x7A4B74616B740002
"""The last two bytes are the version."""
_HEAD = struct.Struct("<2q48s")
_MOST = 1 << 24
"""More numbers than an exchange takes: 128 MiB."""


class Frame(NamedTuple):
    """The numbers of one rank, and what they are for."""

    what: str
    numbers: list[int]

    @classmethod
    def size(cls, data: bytes | bytearray, at: int, rank: int) -> int | None:
        """The number of bytes of the frame at an offset; None if its head is not complete."""
        if len(data) - at < _HEAD.size:
            return None
        mark, count, _ = _HEAD.unpack_from(data, at)
        if mark != _MARK:
            raise TransportError(
                f"rank {rank} has sent no message of an exchange, or one of another version; "
                "install the same version of Taktline on every rank"
            )
        if not 0 <= count <= _MOST:
            raise TransportError(f"rank {rank} announces {count:,} numbers, more than there can be")
        return _HEAD.size + 8 * count

    @classmethod
    def read(cls, data: bytes) -> Frame:
        """The frame in these bytes, which are all of it."""
        _, count, what = _HEAD.unpack_from(data)
        numbers = struct.unpack_from(f"<{count}q", data, _HEAD.size)
        return cls(what.rstrip(b"\0").decode(errors="replace"), list(numbers))


def framed(numbers: Sequence[int], what: str) -> bytes:
    """The bytes of a frame."""
    count = len(numbers)
    if count > _MOST:
        raise TransportError(f"{what} takes {count:,} numbers; at most {_MOST:,} can be shared")
    return _HEAD.pack(_MARK, count, what.encode()[:48]) + struct.pack(f"<{count}q", *numbers)


def agreed(frames: Sequence[Frame], *, ragged: bool) -> None:
    """Raise the same error on every rank unless all ranks are in the same exchange.

    With ``ragged``, ranks may bring different amounts.
    """
    calls = [frame.what for frame in frames]
    if len(set(calls)) > 1:
        raise MismatchError(
            f"the ranks disagree on the call: {by_rank(calls)}; make the same calls in the same "
            "order on every rank"
        )
    counts = [len(frame.numbers) for frame in frames]
    if not ragged and len(set(counts)) > 1:
        raise TransportError(
            f"{calls[0]} takes equally many numbers of each rank, but got {by_rank(counts)}"
        )


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
