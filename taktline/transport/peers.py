"""The sockets of the control plane: called, accepted, and called again if one ends alone."""

from __future__ import annotations

import os
import selectors
import socket
import time
from contextlib import suppress
from typing import Protocol

from taktline.transport.meeting import Meeting, Message, Peer

__all__ = ["Owner", "Peers", "close_sockets", "open_pipe"]

_CHECKS = (0.0, 0.3, 1.0)
"""How many seconds after its socket has ended it is looked whether a process lives."""


class Owner(Protocol):
    """Whom the messages are for."""

    def greet(self, process: int) -> list[Message]:
        """What a process is told that has just connected."""
        ...

    def take(self, process: int, message: Message) -> None:
        """A message has come."""
        ...

    def part(self, process: int, *, said_goodbye: bool) -> None:
        """A process has ended."""
        ...


class Peers:
    """A socket to every other process; all of it on one thread."""

    def __init__(self, meeting: Meeting, selector: selectors.BaseSelector, owner: Owner) -> None:
        self._meeting = meeting
        self._selector = selector
        self._owner = owner
        self._peers: dict[int, Peer] = {}
        self._calling: set[int] = set()
        self._ended: set[int] = set()
        self._checks: list[tuple[float, int]] = []
        """When to look again whether processes live whose sockets have ended."""
        self._next_call = 0.0
        selector.register(meeting.server, selectors.EVENT_READ, self._accept)

    @property
    def processes(self) -> list[int]:
        """Those that are connected."""
        return list(self._peers)

    @property
    def due(self) -> float:
        """When to look after them next."""
        return min([self._next_call, *(at for at, _ in self._checks)])

    def look(self) -> None:
        """Call those that can be found by now, and see who is gone."""
        now = time.monotonic()
        if now >= self._next_call:
            for peer in self._meeting.connect():
                self._register(peer)
            for process in self._meeting.dead():
                self._part(process, said_goodbye=False)
            self._next_call = now + self._meeting.pause
        for check in [each for each in self._checks if each[0] <= now]:
            self._checks.remove(check)
            self._check(check[1])

    def write(self, process: int, message: Message) -> None:
        """Send a message, if the process is connected."""
        peer = self._peers.get(process)
        if peer is not None and not peer.write(message):
            self._lose(peer)

    def close(self) -> None:
        """Let go of all sockets."""
        for peer in self._peers.values():
            peer.close()
        self._meeting.close()

    def _accept(self, _: object) -> None:
        peer = self._meeting.accept()
        if peer is not None:
            self._register(peer)

    def _register(self, peer: Peer) -> None:
        self._selector.register(peer.socket, selectors.EVENT_READ, lambda _: self._read(peer))

    def _read(self, peer: Peer) -> None:
        messages = peer.read()
        process = peer.process
        if process is not None and peer.answered:
            if self._peers.get(process) is not peer:
                self._add(peer, process)
            for message in messages or ():
                if message.kind == "goodbye":
                    peer.said_goodbye = True
                else:
                    self._owner.take(process, message)
        if messages is None:
            self._lose(peer)

    def _add(self, peer: Peer, process: int) -> None:
        """A peer that has said who it is, or has answered."""
        self._meeting.answered(process, peer)
        self._calling.discard(process)
        if (before := self._peers.get(process)) is not None:
            self._drop(before)  # it has noticed first that its socket has ended
        self._peers[process] = peer
        for message in self._owner.greet(process):
            self.write(process, message)

    def _drop(self, peer: Peer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.close()

    def _lose(self, peer: Peer) -> None:
        """A socket has ended: with its process, or alone."""
        self._drop(peer)
        process = peer.process
        if process is None:
            return
        self._meeting.unanswered(process)
        self._calling.discard(process)
        if self._peers.get(process) is not peer:
            return
        del self._peers[process]
        if peer.said_goodbye:
            self._part(process, said_goodbye=True)
        else:
            now = time.monotonic()
            self._checks += [(now + seconds, process) for seconds in _CHECKS]

    def _check(self, process: int) -> None:
        """See whether a process lives whose socket has ended, and connect to it again."""
        if process in self._peers or process in self._ended or process in self._calling:
            return
        if process > self._meeting.process:
            lives = self._meeting.lives(process)  # then it will call
        elif lives := (peer := self._meeting.call(process)) is not None:
            self._calling.add(process)
            self._register(peer)
        if not lives:
            self._part(process, said_goodbye=False)

    def _part(self, process: int, *, said_goodbye: bool) -> None:
        self._ended.add(process)
        self._owner.part(process, said_goodbye=said_goodbye)


def close_sockets(selector: selectors.BaseSelector) -> None:
    """Close what a selector minds, and itself."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
    selector.close()


def open_pipe() -> tuple[int, int]:
    """The two ends of a pipe, on which nobody waits."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write
