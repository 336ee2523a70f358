"""What callers say to a listener before they are let in."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache
from random import Random

from taktline.errors import TransportError
from taktline.transport.sockets import CONTROL, Listener
from tests.fuzz.mutate import spoil_bytes

TOKEN = b"T" * 32
"""Stands for the listener's token."""


def bytes_of(token: str, number: int) -> bytes:
    """A greeting."""
    return token.encode() + CONTROL + number.to_bytes(4, "little")


def draw(random: Random) -> tuple[bool, bytes]:
    """Whether over TCP, and the words of a caller: spoilt, or anything at all."""
    words = bytes_of(TOKEN.decode(), random.choice([0, 1, 2**32 - 1]))
    match random.randrange(4):
        case 0:
            words = spoil_bytes(random, words)
        case 1:
            words = words[: random.randrange(len(words))]
        case 2:
            words = random.randbytes(random.choice([1, 31, 32, 51, 52, 53, 400]))
        case _:
            words += random.randbytes(random.randrange(5))
    return random.random() < 0.5, words


def try_(input: tuple[bool, bytes]) -> None:
    """Say it to a listener, which lets in whoever knows its token, and nobody else."""
    tcp, words = input
    listener = _listener()
    *_, token, name = listener.address
    words = words.replace(TOKEN, token.encode())
    allowed = words.startswith(token.encode()) and len(words) >= len(bytes_of(token, 0))
    greeted = _greeted(listener, words, "" if tcp else name)
    number = int.from_bytes(words[len(TOKEN) + len(CONTROL) :][:4], "little")
    assert greeted == ([number] if allowed else [])
    if not allowed:
        raise TransportError("refused")


def _greeted(listener: Listener, words: bytes, name: str) -> list[int]:
    """The numbers of whoever is let in while a caller says these words, and hangs up."""
    caller = socket.socket(socket.AF_UNIX if name else socket.AF_INET)
    with caller:
        caller.connect(f"\0taktline-{name}" if name else listener.address[:2])
        with suppress(OSError):  # it may have been refused by now
            caller.sendall(words)
            caller.shutdown(socket.SHUT_WR)
        while True:
            found = listener.accept(0.01)
            for greeted in found:
                greeted.socket.close()
            if found or _is_refused(caller):
                return [greeted.number for greeted in found]


def _is_refused(caller: socket.socket) -> bool:
    try:
        return not caller.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionResetError:  # it has said more than was read
        return True


@cache
def _listener() -> Listener:
    return Listener("127.0.0.1")
