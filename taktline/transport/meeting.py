"""How processes of the control plane find each other, and the messages that they send."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from taktline.checks import Either, read
from taktline.errors import JsonError
from taktline.transport.verdict import Verdict

__all__ = ["Meeting", "Message", "Peer"]

_LENGTH = struct.Struct("<I")
_MOST = 1 << 18
"""More bytes than a message has."""
_UNSENT = 1 << 20
"""With so many bytes unsent a peer does not listen any more."""
_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR
_CONNECT_SECONDS = 0.5
_FIRST_PAUSE, _PAUSE = 0.02, 0.25
_REFUSED_SECONDS = 0.25
"""A process that has refused for so long has ended."""
_PROBES = 12
"""So often it is tried whether a process listens that has not called: it may be stopped."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one process says to another."""

    kind: str
    state: str = ""
    busy: bool = False
    value: str = ""
    verdict: Verdict | None = None

    def to_bytes(self) -> bytes:
        """For the wire."""
        data = json.dumps(asdict(self)).encode()
        return _LENGTH.pack(len(data)) + data

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """From the wire; raises a :class:`JsonError` if it is none."""
        plain = read(data, _MESSAGE, what="a message of the control plane")
        verdict = plain.pop("verdict")
        return cls(**plain, verdict=None if verdict is None else Verdict.from_plain(verdict))


_STAGE_ERROR = {
    "rank": int,
    "stage": int,
    "microbatch": Either(None, int),
    "action": str,
    "reason": str,
}
_VERDICT = {
    "cause": str,
    "process": int,
    "text": str,
    "where": str,
    "stage_error": Either(None, _STAGE_ERROR),
    "number": int,
}
_MESSAGE = {
    "kind": str,
    "state": str,
    "busy": bool,
    "value": str,
    "verdict": Either(None, _VERDICT),
}
_ADDRESS = (str, int, str)
"""Host, port, and the token by which strangers are told apart."""

Address = tuple[str, int, str]


class Peer:
    """A socket to another process, which never makes anybody wait."""

    def __init__(self, connection: socket.socket, process: int | None, token: str) -> None:
        self.socket = connection
        self.process = process
        """None until it has said who it is."""
        self.said_goodbye = False
        self.address: Address | None = None
        """Where its process can be called, if it has said so."""
        self.answered = False
        """Whether anything has come from there."""
        self._token = token
        self._unread = bytearray()
        self._unsent = bytearray()
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, message: Message) -> bool:
        """Send a message, or as much of it as there is room for; False if the socket is dead."""
        return self.write_bytes(message.to_bytes())

    def write_bytes(self, data: bytes) -> bool:
        """The same of bytes."""
        if len(self._unsent) < _UNSENT:  # a peer that does not listen has beats enough
            self._unsent += data
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def read(self) -> list[Message] | None:
        """The messages that have arrived; None if the socket has ended, or says what is none."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._unread += data
        self.answered = True
        found: list[Message] = []
        try:
            while len(self._unread) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._unread)
                if length > _MOST:
                    return None
                if len(self._unread) < _LENGTH.size + length:
                    break
                body = bytes(self._unread[_LENGTH.size : _LENGTH.size + length])
                del self._unread[: _LENGTH.size + length]
                if self.process is None:
                    self.process, self.address = self._hello(body)
                else:
                    found.append(Message.from_bytes(body))
        except JsonError:
            return None
        return found

    def close(self) -> None:
        """Let go of the socket."""
        with suppress(OSError):
            self.socket.close()

    def _hello(self, body: bytes) -> tuple[int, Address]:
        process, token, address = read(body, (int, str, _ADDRESS), what="a greeting")
        if not secrets.compare_digest(token, self._token):
            raise JsonError("a greeting", "from a stranger")
        return process, address


class Meeting:
    """Where this process can be found, and where it finds the others: once, by the store.

    Of two processes the one with the higher number calls the other.
    """

    def __init__(self, store: Store, process: int, size: int, name: str) -> None:
        self.process = process
        self.tries = 0
        self.pid = os.getpid()
        self._store = PrefixStore(name, _own(store))
        self._token = secrets.token_hex(16)
        self.host = host = _address(store)
        self.server = socket.create_server((host, 0), backlog=max(size, 16))
        self.server.setblocking(False)
        self._mine: Address = (host, self.server.getsockname()[1], self._token)
        self._addresses: dict[int, Address] = {}
        self._refused: dict[int, float] = {}
        """Since when processes do not listen any more."""
        self._probed: Counter[int] = Counter()
        self._missing = set(range(size)) - {process}
        self._called: set[int] = set()
        self._store.set(str(process), json.dumps(self._mine))

    def connect(self) -> list[Peer]:
        """Call those that can be found by now and have not answered yet."""
        self.tries += 1
        found: list[Peer] = []
        try:
            for process in sorted(self._missing - self._called):
                if process not in self._addresses and not self._find(process):
                    continue
                if (peer := self._first_call(process)) is not None:
                    self._called.add(process)
                    found.append(peer)
        except (RuntimeError, JsonError):  # the store is gone; who is here is all there is
            self._missing = set()
        return found

    def _first_call(self, process: int) -> Peer | None:
        try:
            if process < self.process:
                return self._greet(process)
            if self._probed[process] < _PROBES:
                self._probed[process] += 1
                self._dial(process).close()  # it will call, if it lives
        except ConnectionRefusedError:
            self._refused.setdefault(process, time.monotonic())
            del self._addresses[process]  # perhaps that of an earlier one
        except (OSError, OverflowError):
            pass
        return None

    def _find(self, process: int) -> bool:
        """Look for the address of a process."""
        if not self._store.check([str(process)]):
            return False
        record = self._store.get(str(process))
        self._addresses[process] = read(record, _ADDRESS, what="an address")
        return True

    @property
    def pause(self) -> float:
        """How long to wait before the next call: little at first, when all are about to come."""
        return min(_FIRST_PAUSE * self.tries, _PAUSE) if self._missing else _PAUSE

    def dead(self) -> list[int]:
        """Those who said where they can be found, and then could not be; each once."""
        since = time.monotonic() - _REFUSED_SECONDS
        dead = [p for p in self._missing if self._refused.get(p, since) < since]
        self._missing.difference_update(dead)
        return dead

    def answered(self, process: int, peer: Peer) -> None:
        """Note that a process has answered, and where it can be called again."""
        self._missing.discard(process)
        if peer.address is not None:
            self._addresses[process] = peer.address

    @property
    def present(self) -> set[int]:
        """Those who have said where they can be found."""
        return set(self._addresses)

    def lives(self, process: int) -> bool:
        """Whether a process listens: it does so as long as it lives, even while it is stopped."""
        try:
            self._dial(process).close()
        except (KeyError, OSError, OverflowError):
            return False
        return True

    def unanswered(self, process: int) -> None:
        """Call it again: what the store had was the address of an earlier one."""
        self._called.discard(process)

    def accept(self) -> Peer | None:
        """A process that calls; it has to say who it is."""
        try:
            connection, _ = self.server.accept()
        except OSError:
            return None
        return Peer(connection, None, self._token)

    def close(self) -> None:
        """Be found no more."""
        self.server.close()

    def forget(self) -> None:
        """Be found no more in the store, where later groups of this process meet, too."""
        with suppress(RuntimeError):  # it may be gone
            self._store.delete_key(str(self.process))

    def call(self, process: int) -> Peer | None:
        """A new socket to a process; None if it cannot be reached."""
        try:
            return self._greet(process)
        except (KeyError, OSError, OverflowError):
            return None

    def _dial(self, process: int) -> socket.socket:
        return socket.create_connection(self._addresses[process][:2], _CONNECT_SECONDS)

    def _greet(self, process: int) -> Peer | None:
        connection, address = self._dial(process), self._addresses[process]
        token = address[2]
        peer = Peer(connection, process, token)
        peer.address = address
        hello = json.dumps([self.process, token, self._mine]).encode()
        return peer if peer.write_bytes(_LENGTH.pack(len(hello)) + hello) else None


def _own(store: Store) -> Store:
    """A connection to the store for another thread."""
    clone: Any = getattr(store, "clone", None)
    return store if clone is None else clone()


def _address(store: Store) -> str:
    """The address under which the other hosts reach this one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, _INTERFACE_ADDRESS, request)[20:24])
    while hasattr(store, "underlying_store"):
        store = store.underlying_store  # pyright: ignore[reportAttributeAccessIssue]
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing: asks which way the store is
            return probe.getsockname()[0]
    return "127.0.0.1"
