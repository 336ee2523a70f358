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
_PIECE = 1 << 16
_PATIENCE = 300e-6
"""For so many seconds a wait stays awake: waking a sleeper takes time, here and at the sender."""

Lost: TypeAlias = Callable[[bool], Exception]
"""Returns the error to raise if the other rank is lost, or (True) does not answer in time."""


class Lane:
    """One rank's end of a connection to another one; ``seconds`` is the timeout of each wait."""

    def __init__(self, connection: socket.socket, seconds: float, lost: Lost) -> None:
        self._socket = connection
        self._seconds = seconds
        self._lost = lost
        self._posted: deque[_Message] = deque()
        self._rest: deque[_Message] = deque()
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._reads_ahead = False
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        finalize(self, connection.close)

    def send(self, buffer: torch.Tensor, marks: bytes | bytearray = b"") -> Handle:
        """Send marks and a buffer on the CPU."""
        leaving = _Message(buffer, marks, self._flush)
        with self._writing:
            if not self._rest:
                try:
                    leaving.cut(self._socket.sendmsg(leaving.left))
                except BlockingIOError:
                    pass  # the kernel has no room
                except OSError as error:
                    raise self._lost(False) from error
                if not leaving.left:
                    return leaving
            leaving.ended = threading.Event()
            self._rest.append(leaving)
            if len(self._rest) == 1:
                threading.Thread(target=self._write_rest, name="taktline lane", daemon=True).start()
        return leaving

    def receive(self, buffer: torch.Tensor, marks: bytes | bytearray = b"") -> Handle:
        """Receive marks and a buffer, after those that were posted before."""
        arriving = _Message(buffer, marks, self._arrive)
        with self._reading:
            if arriving.left:
                self._posted.append(arriving)
            if buffer.nbytes > _SMALL and not self._reads_ahead:
                self._reads_ahead = True
                threading.Thread(target=self._read_ahead, name="taktline lane", daemon=True).start()
        return arriving

    def _arrive(self, wanted: _Message) -> None:
        """Wait until a message has arrived."""
        with self._reading:
            while wanted.left:
                try:
                    self._read()
                except BlockingIOError:
                    self._await()
                except OSError as error:
                    raise self._lost(False) from error

    def take(self) -> bytes:
        """Some bytes, for a receiver that does not know how many there are; waits for them."""
        while True:
            try:
                if data := self._socket.recv(_PIECE):
                    return data
                raise self._lost(False)
            except BlockingIOError:
                self._await()
            except OSError as error:
                raise self._lost(False) from error

    def _await(self) -> None:
        """Wait until something arrives."""
        if not _events(self._arrivals, self._seconds):
            raise self._lost(True)

    def _read(self) -> None:
        """Take what has arrived."""
        first = self._posted[0]
        count = self._socket.recvmsg_into(first.left)[0]
        if not count:
            raise ConnectionResetError("the connection has ended")
        first.cut(count)
        if not first.left:
            self._posted.popleft()

    def _read_ahead(self) -> None:
        """Read while the rank computes; on a thread that ends when nothing is awaited."""
        arrivals = select.poll()
        arrivals.register(self._socket, select.POLLIN)
        while self._reads_ahead:
            arrivals.poll()
            with self._reading:
                try:
                    if self._posted:
                        self._read()
                except BlockingIOError:
                    pass
                except OSError:  # the wait for the message fails, too
                    self._reads_ahead = False
                self._reads_ahead &= bool(self._posted)

    def _flush(self, leaving: _Message) -> None:
        """Wait until a message is sent."""
        if not leaving.ended.wait(self._seconds):
            raise self._lost(True)
        if leaving.left:
            raise self._lost(False)

    def shut(self) -> None:
        """End every wait, here and at the other end; from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write_rest(self) -> None:
        """Write the messages that the kernel had no room for; on a thread that ends with them."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while self._rest:
            room.poll()
            with self._writing:
                if not self._rest:
                    return  # another thread has begun before this one has ended
                first = self._rest[0]
                try:
                    first.cut(self._socket.sendmsg(first.left))
                except BlockingIOError:
                    pass
                except OSError:  # the waits fail, as something is left of each message
                    while self._rest:
                        self._rest.popleft().ended.set()
                    return
                if not first.left:
                    self._rest.popleft().ended.set()


class _Message:
    """A message under way: marks, and a buffer; ``finish(message)`` waits for it."""

    __slots__ = ("_buffer", "_finish", "ended", "left")

    ended: threading.Event
    """Set once it is sent, or lost; only if the kernel had no room for it."""

    def __init__(
        self,
        buffer: torch.Tensor,
        marks: bytes | bytearray,
        finish: Callable[[_Message], None],
    ) -> None:
        self._buffer = buffer  # which owns the memory
        self._finish = finish
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
            self._finish(self)


@lru_cache(64)
def _array(size: int) -> type[Array[c_char]]:
    return c_char * size


def _events(poll: select.poll, seconds: float) -> list[tuple[int, int]]:
    """The next events on sockets; none once the time is over."""
    if hasattr(os, "sched_yield"):
        end = time.perf_counter() + _PATIENCE
        while time.perf_counter() < end:
            os.sched_yield()  # the other process may need this core
            if found := poll.poll(0):
                return found
    return poll.poll(seconds * 1000)
