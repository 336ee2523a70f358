"""Messages between two ranks on the CPU, over plain sockets.

Not over gloo: its waits cannot be ended, it may lose a message when a connection ends, and for each
message it wakes a thread, which wakes the caller. Here the caller writes and reads itself. The
kernel takes as much of a message as it has room for. A thread sends the rest, so that no sender
waits for a busy receiver. A thread also reads large messages while their receiver computes.

A lane carries one kind of data, both ways, so that activations never wait for gradients.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ctypes import Array, c_char
from functools import lru_cache
from typing import TypeAlias
from weakref import finalize

import torch

from taktline.transport.base import Handle

_SMALL = 1 << 16
"""The most bytes of a small message; the kernel has room for dozens of them."""
_PATIENCE = 300e-6
"""For so many seconds a wait stays awake: waking a sleeper takes time, here and at the sender."""

Lost: TypeAlias = Callable[[bool], Exception]
"""Returns the error to raise if the other rank is lost, or (True) does not answer in time."""


class Lane:
    """One rank's end of a connection to another one; ``seconds`` is the timeout of each wait."""

    def __init__(self, connection: socket.socket, seconds: float, lost: Lost) -> None:
        self._socket = connection
        self._out = _Way(connection, seconds, lost, reads=False)
        self._in = _Way(connection, seconds, lost, reads=True)
        finalize(self, _end, connection)

    def send(self, buffer: torch.Tensor, marks: bytes | bytearray = b"") -> Handle:
        """Send marks and a buffer on the CPU."""
        return self._out.post(buffer, marks)

    def receive(self, buffer: torch.Tensor, marks: bytes | bytearray = b"") -> Handle:
        """Receive marks and a buffer, after those that were posted before."""
        return self._in.post(buffer, marks)

    def shut(self) -> None:
        """End every wait, here and at the other end; from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # which ends its threads
    connection.close()


class _Way:
    """One direction of a lane."""

    def __init__(
        self, connection: socket.socket, seconds: float, lost: Lost, *, reads: bool
    ) -> None:
        self._connection, self._seconds, self._lost = connection, seconds, lost
        self._reads = reads
        self._poll = self._poll_of()
        self._posted: deque[_Message] = deque()
        self._lock = threading.Lock()
        """Held while messages are posted, moved and awaited."""
        self._helped = False
        """Whether a thread moves messages, too."""
        self._error: OSError | None = None
        """Why nothing can be moved any more."""

    def _poll_of(self) -> select.poll:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN if self._reads else select.POLLOUT)
        return poll

    def post(self, buffer: torch.Tensor, marks: bytes | bytearray) -> _Message:
        """Let a message be moved after all others; what takes long, a thread moves."""
        message = _Message(buffer, marks, self)
        with self._lock:
            if message.left:
                self._posted.append(message)
            try:
                if not self._reads:
                    self._move()
            except OSError as error:
                raise self._lost(False) from error
            takes_long = buffer.nbytes > _SMALL or not self._reads
            if message.left and takes_long and not self._helped:
                self._helped = True
                threading.Thread(target=self._help, name="taktline lane", daemon=True).start()
        return message

    def finish(self, message: _Message) -> None:
        """Wait until a message is sent, or has arrived."""
        with self._lock:
            try:
                while message.left:
                    if not self._move() and not self._await():
                        raise self._lost(True)
            except OSError as error:
                raise self._lost(False) from error

    def _help(self) -> None:
        """Move messages while the rank computes; on a thread that ends when none is left."""
        poll = self._poll_of()
        while self._helped:
            poll.poll()
            with self._lock:
                with suppress(OSError):  # the waits fail, too
                    self._move()
                self._helped = bool(self._posted) and self._error is None

    def _move(self) -> bool:
        """Move what the kernel takes, or has; returns whether that is anything."""
        if self._error is not None:
            raise self._error
        if not self._posted:
            return False
        first = self._posted[0]
        try:
            if self._reads:
                count = self._connection.recvmsg_into(first.left)[0]
            else:
                count = self._connection.sendmsg(first.left)
            if not count:
                raise ConnectionResetError("the connection has ended")
        except BlockingIOError:
            return False
        except OSError as error:
            self._error = error
            raise
        first.cut(count)
        if not first.left:
            self._posted.popleft()
        return True

    def _await(self) -> bool:
        """Wait until something can be moved; returns whether it can."""
        if hasattr(os, "sched_yield"):
            end = time.perf_counter() + _PATIENCE
            while time.perf_counter() < end:
                os.sched_yield()  # the other process may need this core
                if self._poll.poll(0):
                    return True
        return bool(self._poll.poll(self._seconds * 1000))


class _Message:
    """A message under way: marks, and a buffer."""

    __slots__ = ("_buffer", "_way", "left")

    def __init__(self, buffer: torch.Tensor, marks: bytes | bytearray, way: _Way) -> None:
        self._buffer = buffer  # which owns the memory
        self._way = way
        self.left: list[memoryview] = []
        """What is still to be sent or received."""
        if marks:
            self.left.append(memoryview(marks))
        if size := buffer.nbytes:
            # NumPy does not know all of torch's types.
            self.left.append(memoryview(_array(size).from_address(buffer.data_ptr())))

    @property
    def done(self) -> bool:
        """Whether the message is sent, or has arrived."""
        return not self.left

    def cut(self, count: int) -> None:
        """Take off so many bytes, which were sent or received."""
        while self.left and count >= len(self.left[0]):
            count -= len(self.left.pop(0))
        if count:
            self.left[0] = self.left[0][count:]

    def wait(self) -> None:
        """Return once the message is sent, or has arrived."""
        if self.left:
            self._way.finish(self)


@lru_cache(64)
def _array(size: int) -> type[Array[c_char]]:
    return c_char * size
