"""The messages of the control plane, and a socket that carries them to another process."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass

from taktline.checks import Either, read
from taktline.errors import JsonError
from taktline.transport.verdict import Verdict

_LENGTH = struct.Struct("<I")
_MOST = 1 << 18
"""More bytes than a message has."""
_UNSENT = 1 << 20
"""How many unread bytes show that a peer does not listen any more."""

_VERDICT = {
    "cause": str,
    "process": int,
    "text": str,
    "where": str,
    "stage_error": str,
    "number": int,
}
_MESSAGE = {
    "kind": str,
    "state": str,
    "busy": bool,
    "value": str,
    "verdict": Either(None, _VERDICT),
}


@dataclass(frozen=True, slots=True)
class Message:
    """A message from one process to another."""

    kind: str
    state: str = ""
    busy: bool = False
    value: str = ""
    verdict: Verdict | None = None

    def to_bytes(self) -> bytes:
        """The bytes to send, with their length first."""
        data = json.dumps(asdict(self)).encode()
        return _LENGTH.pack(len(data)) + data

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """The message in these bytes; raises a :class:`JsonError` if there is none."""
        plain = read(data, _MESSAGE, what="a message of the control plane")
        verdict = plain.pop("verdict")
        return cls(**plain, verdict=None if verdict is None else Verdict.from_plain(verdict))


class Peer:
    """A non-blocking socket to another process.

    Args:
        connection: the socket.
        process: the number of the other process.
    """

    def __init__(self, connection: socket.socket, process: int) -> None:
        self.socket = connection
        self.process = process
        self.said_goodbye = False
        self.answered = False
        """Whether it has sent anything."""
        self._unread = bytearray()
        self._unsent = bytearray()
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, message: Message) -> bool:
        """Send as much of a message as there is room for; False if the socket is dead."""
        if len(self._unsent) < _UNSENT:
            self._unsent += message.to_bytes()
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def read(self) -> list[Message] | None:
        """The messages that have arrived; None if the socket has ended or sent anything else."""
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
                found.append(Message.from_bytes(body))
        except JsonError:
            return None
        return found
