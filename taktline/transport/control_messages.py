"""The messages of the control plane, and a socket that carries them to a neighbour.

A message is a kind and a body, as JSON, with its length first::

    hello     the first message: where the sender can be called, and all news that it knows
    beat      what the sender is doing, twice a second
    news      what everyone has to know; each process passes on what is new to it
    routed    what some processes have to know; passed on towards them
    goodbye   the last message of a program that ends in order

News are items of these kinds::

    here      processes that have come: bits of a number, in hexadecimal
    gone      a process that is not there any more, and why
    ask       "what are you all doing?"
    state     what a process is doing
    verdict   why a process leaves its groups
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

from taktline.checks import Either, conform, read
from taktline.errors import JsonError
from taktline.transport.listener import ADDRESS
from taktline.transport.verdict import Verdict

_LENGTH = struct.Struct("<I")
_MOST = 1 << 20
"""More bytes than a message has."""
_BATCH = 1 << 16
"""After how many characters the items of news go on in another message."""
_UNSENT = 1 << 22
"""How many unread bytes show that a neighbour does not listen any more."""
_WHAT = "a message of the control plane"


class State(NamedTuple):
    """What a process has said that it is doing."""

    process: int
    number: int
    """How often it has said so."""
    age: float
    """How many seconds ago."""
    text: str
    busy: bool
    """Whether it is in a step."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A message for some processes: a value at a place or, with a verdict, that its sender left."""

    origin: int
    """The process that sends it."""
    number: int
    """Increases with each message of its sender."""
    to: list[int]
    place: str
    value: str = ""
    verdict: Verdict | None = None


Item: TypeAlias = tuple[str, Any]
"""News: its kind and what it says."""

_VERDICT = {
    "cause": str,
    "process": int,
    "text": str,
    "where": str,
    "stage_error": str,
    "number": int,
}
_STATE = (int, int, float, str, bool)
_ITEMS: dict[str, Any] = {
    "here": str,
    "gone": (int, str),
    "ask": int,
    "state": _STATE,
    "verdict": (int, _VERDICT),
}
_ROUTED = {
    "origin": int,
    "number": int,
    "to": [int],
    "place": str,
    "value": str,
    "verdict": Either(None, _VERDICT),
}
_NEWS = [(str, object)]
_BODIES: dict[str, Any] = {
    "hello": (ADDRESS, _NEWS),
    "beat": _STATE,
    "news": _NEWS,
    "routed": _ROUTED,
    "goodbye": None,
}


def encode(kind: str, body: Any = None) -> bytes:
    """The bytes of a message, with their length first."""
    return _framed(json.dumps([kind, body], default=asdict))


def encode_news(items: Sequence[Item]) -> bytes:
    """The bytes of as many messages as the items need."""
    batches: list[list[str]] = []
    length = _BATCH
    for item in items:
        text = json.dumps(item, default=asdict)
        if length + len(text) > _BATCH:
            batches.append([])
            length = 0
        batches[-1].append(text)
        length += len(text)
    return b"".join(_framed(f'["news", [{", ".join(batch)}]]') for batch in batches)


def _framed(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def decode(data: bytes) -> tuple[str, Any]:
    """The kind and the body of a message; raises a :class:`JsonError` if it is none.

    >>> decode(encode("news", [("here", "9")])[4:])
    ('news', [('here', '9')])
    """
    kind, body = read(data, (str, object), what=_WHAT)
    if kind not in _BODIES:
        raise JsonError(_WHAT, f"no kind is {kind[:40]!r}")
    conform(body, _BODIES[kind], what=_WHAT)
    match kind:
        case "hello":
            return kind, (tuple(body[0]), [_item(*each) for each in body[1]])
        case "beat":
            return kind, State(*body)
        case "news":
            return kind, [_item(*each) for each in body]
        case "routed":
            verdict = body.pop("verdict")
            return kind, Routed(**body, verdict=verdict and Verdict.from_plain(verdict))
        case _:
            return kind, None


def _item(kind: str, body: Any) -> Item:
    if kind not in _ITEMS:
        raise JsonError(_WHAT, f"no news are {kind[:40]!r}")
    conform(body, _ITEMS[kind], what=_WHAT)
    if kind == "here":
        _check_bits(body)
    if kind == "verdict":
        return kind, (body[0], Verdict.from_plain(body[1]))
    return kind, State(*body) if kind == "state" else body


def _check_bits(text: str) -> None:
    try:
        int(text, 16)
    except ValueError:
        raise JsonError(_WHAT, f"{text[:40]!r} is no set of processes") from None


class Link:
    """A non-blocking socket to a neighbour.

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

    def write(self, data: bytes) -> bool:
        """Send as much as there is room for; False if the socket is dead."""
        if len(self._unsent) < _UNSENT:
            self._unsent += data
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def read(self) -> list[tuple[str, Any]] | None:
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
        found: list[tuple[str, Any]] = []
        try:
            while len(self._unread) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._unread)
                if length > _MOST:
                    return None
                if len(self._unread) < _LENGTH.size + length:
                    break
                body = bytes(self._unread[_LENGTH.size : _LENGTH.size + length])
                del self._unread[: _LENGTH.size + length]
                found.append(decode(body))
        except JsonError:
            return None
        return found
