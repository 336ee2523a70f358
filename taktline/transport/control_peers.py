"""The sockets of the control plane: one to every other process of the job.

The processes find each other's addresses in the store, once. Of two processes the one with the
higher number calls the other. A socket that ends while its process lives is replaced.

All this is done in rounds, in which a process calls the missing ones, or sees whether they listen.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from taktline.checks import read
from taktline.errors import JsonError, LostRankError
from taktline.transport.control_messages import Message, Peer
from taktline.transport.listener import ADDRESS, Address, Listener, call
from taktline.transport.own_host import own_host

_CONNECT_SECONDS = 0.5
_FIRST_PAUSE, _PAUSE = 0.02, 0.25
"""The pause between two rounds: short at first, when all processes are about to come."""
_REFUSED_SECONDS = 0.25
"""How long a process that was never connected refuses calls before it counts as ended."""
_PROBES = 12
"""How often a process that does not call is tried: it may be stopped."""


def require_alive(store: Store) -> None:
    """Raise unless the store answers: to connect to one that is gone takes its whole timeout."""
    try:
        store.check([""])
    except RuntimeError as error:
        raise LostRankError(
            "rank 0 is lost: the store of the process group, which it or a launcher keeps, "
            "does not answer. Look at the output of both; restart all ranks",
            peer=0,
        ) from error


class Peers:
    """A socket to every other process; used on the control thread, but for :meth:`wake`.

    Args:
        store: where the processes find each other's addresses, under ``name``.
        process: the number of this process, of ``size``.
        greet: returns the messages for a process that has just connected.
        take: called with each message.
        part: called when a process has ended, with whether it has said goodbye.
    """

    def __init__(
        self,
        store: Store,
        process: int,
        size: int,
        name: str,
        *,
        greet: Callable[[int], list[Message]],
        take: Callable[[int, Message], None],
        part: Callable[[int, bool], None],
    ) -> None:
        self._process, self._size = process, size
        self._greet, self._take, self._part = greet, take, part
        require_alive(store)
        # A connection of its own, for another thread.
        own = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._store = PrefixStore(name, own)
        self.host = own_host(store)
        """The address under which other hosts reach this one."""
        self._listener = Listener(self.host, size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        reader, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(reader, selectors.EVENT_READ, lambda: reader.recv(4096))
        self._peers: dict[int, Peer] = {}
        self._addresses: dict[int, Address] = {}
        self._missing = set(range(size)) - {process}
        """The processes that are not connected, and not known to have ended."""
        self._calling: set[int] = set()
        """The processes that were called and have not answered."""
        self._probed: Counter[int] = Counter()
        self._refused: dict[int, float] = {}
        """Since when processes refuse calls."""
        self._met: set[int] = set()
        """The processes that have been connected."""
        self._rounds = 0
        self.due = 0.0
        """When to call :meth:`look` next."""
        self._store.set(str(process), json.dumps(self._listener.address))

    @property
    def connected(self) -> list[int]:
        """The processes that are connected."""
        return list(self._peers)

    @property
    def present(self) -> set[int]:
        """The processes that are connected, or have said where they can be called."""
        return {*self._peers, *self._addresses}

    def look(self) -> None:
        """Call the processes that can be found by now, and see which have ended."""
        now = time.monotonic()
        if now >= self.due:
            self._call_missing()
            self._rounds += 1
            pause = _FIRST_PAUSE * self._rounds if self._missing else _PAUSE
            self.due = now + min(pause, _PAUSE)

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, or :meth:`wake` is called, and take it."""
        for key, _ in self._selector.select(seconds):
            key.data()
        self._accept()  # also to drop callers that say nothing

    def wake(self) -> None:
        """End the wait; from any thread."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def write(self, process: int, message: Message) -> None:
        """Send a message, if the process is connected."""
        peer = self._peers.get(process)
        if peer is not None and not peer.write(message):
            self._lose(peer)

    def close(self) -> None:
        """Close all sockets; in a forked process, those of its parent stay open."""
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._listener.close()
        self._waker.close()

    def forget(self) -> None:
        """Remove the address from the store, where later groups of this process meet, too."""
        with suppress(RuntimeError):  # the store may be gone
            self._store.delete_key(str(self._process))

    def _call_missing(self) -> None:
        try:
            for process in sorted(self._missing - self._calling):
                if process in self._addresses or self._look_up(process):
                    self._try(process)
        except (RuntimeError, JsonError) as error:  # nobody else can be found
            unknown = self._missing - self._addresses.keys()
            self._missing -= unknown
            if 0 in unknown and isinstance(error, RuntimeError):
                self._end(0)  # the store is gone, and with it the process that kept it
        until = time.monotonic() - _REFUSED_SECONDS
        for process in sorted(self._refused, key=self._refused.__getitem__):
            if process in self._missing and self._refused[process] < until:
                self._end(process)

    def _look_up(self, process: int) -> bool:
        """Whether the store has the address of a process."""
        if not self._store.check([str(process)]):
            return False
        record = self._store.get(str(process))
        self._addresses[process] = read(record, ADDRESS, what="an address")
        return True

    def _try(self, process: int) -> None:
        """Call a process, or see whether it lives."""
        if not self._addresses[process][1]:  # it has ended, see early_end
            # Before any that has left since, perhaps because of this one.
            self._refused.setdefault(process, time.monotonic() - _REFUSED_SECONDS / 2)
            del self._addresses[process]  # perhaps that of an earlier process
            return
        if process > self._process and self._probed[process] >= _PROBES:
            return
        self._probed[process] += 1
        try:
            self._reach(process)
        except (OSError, OverflowError, ValueError) as error:  # the latter: no address at all
            if process in self._met:
                self._end(process)
            elif isinstance(error, ConnectionRefusedError):
                self._refused.setdefault(process, time.monotonic())
                del self._addresses[process]  # perhaps that of an earlier process

    def _reach(self, process: int) -> None:
        """Call a process with a lower number; see whether one with a higher number listens.

        A process listens as long as it lives, even while it is stopped, and will call this one.
        """
        address = self._addresses[process]
        if process > self._process:
            socket.create_connection(address[:2], _CONNECT_SECONDS).close()
            return
        peer = Peer(call(address, self._process, _CONNECT_SECONDS), process)
        self._calling.add(process)
        self._register(peer)
        # The store may be gone when this process has to be called.
        peer.write(Message("address", value=json.dumps(self._listener.address)))

    def _accept(self) -> None:
        for process, connection in self._listener.accept():
            if process == self._process or process >= self._size:
                connection.close()
                continue
            peer = Peer(connection, process)
            self._register(peer)
            self._add(peer)

    def _register(self, peer: Peer) -> None:
        self._selector.register(peer.socket, selectors.EVENT_READ, lambda: self._read(peer))

    def _read(self, peer: Peer) -> None:
        messages = peer.read()
        if messages is None:
            self._lose(peer)
            return
        if peer.answered and self._peers.get(peer.process) is not peer:
            self._add(peer)
        for message in messages:
            if message.kind == "goodbye":
                peer.said_goodbye = True
            elif message.kind == "address":
                with suppress(JsonError):
                    self._addresses[peer.process] = read(message.value, ADDRESS, what="an address")
            else:
                self._take(peer.process, message)

    def _add(self, peer: Peer) -> None:
        """Note a peer that has greeted, or has answered."""
        process = peer.process
        self._missing.discard(process)
        self._met.add(process)
        self._calling.discard(process)
        self._refused.pop(process, None)
        if (before := self._peers.get(process)) is not None:
            self._drop(before)  # the other process has noticed first that this socket has ended
        self._peers[process] = peer
        for message in self._greet(process):
            self.write(process, message)

    def _drop(self, peer: Peer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()

    def _lose(self, peer: Peer) -> None:
        """Let go of a socket that has ended: with its process, or alone."""
        self._drop(peer)
        process = peer.process
        self._calling.discard(process)
        if self._peers.get(process) is not peer:
            return
        del self._peers[process]
        if peer.said_goodbye:
            self._part(process, True)
        else:
            self._missing.add(process)
            self._probed[process] = 0
            self.due = 0.0

    def _end(self, process: int) -> None:
        """Note that a process has ended without a goodbye."""
        self._missing.discard(process)
        self._part(process, False)
