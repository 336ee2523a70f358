"""Programs that are written per rank, with all ranks in one process: for debugging and tests.

Each rank has a thread of its own, and the threads pass a baton. Exactly one runs at any time. It
passes the baton on only where it waits for another rank, or where it ends. So every run is the
same, and no other rank changes anything between two waits::

    rank 0  ━━━━━┓              ┏━━━━
    rank 1       ┗━━━━┓         ┃
    rank 2            ┗━━━━━━━━━┛

>>> run(lambda rank: rank + 1, 3)
[1, 2, 3]
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar, TypeVarTuple

import torch

from taktline.checks import check, check_callable
from taktline.errors import DeadlockError, TransportError
from taktline.text import counted
from taktline.transport.base import Channel, Frame, Handle, Post, Transport, bytes_of

MOST_RANKS = 1024
"""Of one process: each has a thread."""

T = TypeVar("T")
Args = TypeVarTuple("Args")
_thread = threading.local()


def run(fn: Callable[[int, *Args], T], ranks: int, *args: *Args, strict: bool = False) -> list[T]:
    """Call ``fn(rank, *args)`` for each rank, and return the results in the order of the ranks.

    With ``strict`` a send blocks until its receive is posted, as it may over nccl. Random numbers
    belong to the rank: each draws what it would alone, beginning where the caller is (on CUDA, too,
    if that is initialised by now). Ctrl-C ends each rank at its next call of the transport.

    Each rank has a thread of its own, which begins like that of a new process: blocks such as
    ``torch.no_grad``, ``torch.autocast``, ``torch.device`` or ``torch.cuda.stream``, modes such as
    ``FlopCounterMode`` and hooks on saved tensors are the caller's. Enter them in ``fn``.

    >>> def share(rank, factor):
    ...     return current().exchange([rank, factor * rank])
    >>> run(share, 2, 10)
    [[[0, 0], [1, 10]], [[0, 0], [1, 10]]]
    """
    check_callable("fn", fn)
    return _World(ranks, strict=strict).run(lambda rank: fn(rank, *args))


def current() -> LocalTransport | None:
    """The transport of the rank that asks, or None outside of :func:`run`.

    >>> print(current(), run(lambda rank: current().rank, 3))
    None [0, 1, 2]
    """
    return getattr(_thread, "transport", None)


def refuse_inside() -> None:
    """Raise if this is a local rank: it cannot have local ranks of its own."""
    if (here := current()) is not None:
        raise TransportError(f"rank {here.rank} is a local rank and cannot run local ranks itself")


class Random:
    """The state that the generators of random numbers have now."""

    def __init__(self) -> None:
        self._on_cpu = torch.get_rng_state()
        self._on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self._on_cpu)
        torch.cuda.set_rng_state_all(self._on_cuda)


class LocalTransport(Transport):
    """The transport of a local rank; :func:`current` returns it.

    >>> run(lambda rank: current().exchange([rank * rank]), 3)[0]
    [[0], [1], [4]]
    """

    def __init__(self, world: _World, rank: int, size: int) -> None:
        self.rank, self.size, self.random = rank, size, Random()
        self._world = world
        self._opened: set[Channel] = set()
        self._turn = threading.Lock()
        self._turn.acquire()
        # Before a rank begins, it awaits an exchange that is done; later, while it runs, nothing.
        self._awaited: _Exchange | _Message | None = _Exchange(0)
        self._deadlock: str | None = None
        self._end = "has ended"

    def open(self, channels: Sequence[Channel]) -> None:
        self._opened.update(channels)

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        blocks = self._world.strict and not eager
        return self._poster(channel, channel.sender, "send", blocks)

    def receiver(self, channel: Channel) -> Post:
        return self._poster(channel, channel.receiver, "receive", False)

    def _gather(self, mine: Frame) -> list[Frame]:
        self._check_turn()
        exchange = self._world.exchange
        exchange.given[self.rank] = mine
        if exchange.done:
            # The next one may begin before all ranks have seen the end of this one.
            self._world.exchange = _Exchange(self.size)
        self._wait(exchange)
        return [exchange.given[rank] for rank in range(self.size)]

    def _poster(self, channel: Channel, rank: int, verb: str, blocks: bool) -> Post:
        """The function that matches a message with the other end's first, or lets it wait."""
        if rank != self.rank:
            raise TransportError(f"rank {self.rank} cannot {verb} {channel}")
        if channel not in self._opened:
            raise TransportError(f"{channel}: rank {rank} has not opened this channel")
        mine = self._world.posted[channel, verb]
        others = self._world.posted[channel, "receive" if verb == "send" else "send"]

        def post(buffer: torch.Tensor, marks: bytes | bytearray = b"") -> Handle:
            self._check_turn()
            message = _Message(self, f"to {verb} {channel}", buffer, marks)
            if others:
                _copy(channel, *((message, others[0]) if verb == "send" else (others[0], message)))
                others.popleft()
            else:
                mine.append(message)
            if blocks:
                message.wait()
            return message

        return post

    def _wait(self, awaited: _Exchange | _Message) -> None:
        """Pass the baton on until an exchange or a message is done."""
        self._check_turn()
        if awaited.done:
            return
        self._awaited, self.random = awaited, Random()
        self._world.pass_on(self.rank)
        self._turn.acquire()
        self.random.restore()
        self._awaited, deadlock, self._deadlock = None, self._deadlock, None
        self._check_turn()
        if deadlock is not None:
            raise DeadlockError(deadlock)

    def _check_turn(self) -> None:
        """Raise after Ctrl-C, or if it is another rank's turn, as waiting would deadlock."""
        if self._world.holder is not self:
            raise TransportError(f"only rank {self.rank} can use its transport, while it runs")
        if self._world.interrupts:
            raise KeyboardInterrupt("the local ranks were stopped")

    def _can_go_on(self) -> bool:
        return self._awaited is not None and (self._awaited.done or self._deadlock is not None)

    def _live(self, fn: Callable[[int], Any], results: list[Any], threads: int) -> None:
        # Read before anything runs: in a new thread, some kernels take all cores otherwise.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        self._turn.acquire()
        self._awaited, world, _thread.transport = None, self._world, self
        self.random.restore()
        try:
            self._check_turn()
            results[self.rank] = fn(self.rank)
        except BaseException as error:
            self._end = f"has raised {type(error).__name__}"
            if not world.errors:
                error.add_note(f"on rank {self.rank} of {counted(self.size, 'local rank')}")
                world.errors.append(error)
        _thread.transport = None
        world.pass_on(self.rank)

    def __str__(self) -> str:
        doing = self._end if self._awaited is None else f"waits {self._awaited}"
        return f"rank {self.rank} {doing}"


class _World:
    """The ranks of one run, and the messages between them."""

    # Only the rank with the baton touches a world, so it needs no lock.
    def __init__(self, size: int, *, strict: bool) -> None:
        size = check("ranks", size, int, least=1, most=MOST_RANKS, error=TransportError)
        check("strict", strict, bool)
        refuse_inside()
        self.strict = strict
        # The caller's thread has the baton before the ranks have it, and after them.
        self.caller, *self.ranks = (LocalTransport(self, rank, size) for rank in range(-1, size))
        self.holder = self.caller
        self.exchange = _Exchange(size)
        self.posted: defaultdict[tuple[Channel, str], deque[_Message]] = defaultdict(deque)
        self.errors: list[BaseException] = []
        self.interrupts: list[BaseException] = []

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        """Call a function on each rank, once; all of them have ended after it."""
        results: list[Any] = [None] * len(self.ranks)
        work = fn, results, torch.get_num_threads()
        for rank in self.ranks:
            target, name = copy_context().run, f"rank {rank.rank}"
            threading.Thread(None, target, name, (rank._live, *work), daemon=True).start()
        self.pass_on(self.caller.rank)
        while self.holder is not self.caller:
            try:
                self.caller._turn.acquire()
            except BaseException as error:
                self.interrupts.append(error)
        self.caller.random.restore()
        # The ranks hold each other for a while; nobody's tensors should stay as long.
        for messages in self.posted.values():
            messages.clear()
        raised = [*self.interrupts, *self.errors]
        self.interrupts.clear()
        self.errors.clear()
        if raised:
            raise raised.pop(0)
        return results

    def pass_on(self, rank: int) -> None:
        """Pass the baton to the next rank that can go on; if none can, wake all that wait."""
        order = self.ranks[rank + 1 :] + self.ranks[: rank + 1]
        if not any(other._can_go_on() for other in order):
            text = "".join(["no rank can go on", *(f"\n  {other}" for other in self.ranks)])
            for other in order:
                other._deadlock = text
        self.holder = next((other for other in order if other._can_go_on()), self.caller)
        self.holder._turn.release()


class _Exchange:
    """The numbers that ranks have passed so far in one exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: dict[int, Frame] = {}

    @property
    def done(self) -> bool:
        return len(self.given) == self.size

    def __str__(self) -> str:
        missing = [str(rank) for rank in range(self.size) if rank not in self.given]
        return f"for an exchange with rank{'s' * (len(missing) > 1)} {', '.join(missing)}"


class _Message:
    """A buffer that was posted, and the handle for it."""

    def __init__(
        self, rank: LocalTransport, what: str, buffer: torch.Tensor, marks: bytes | bytearray
    ) -> None:
        self._rank, self._what = rank, what
        # Bytes, not numbers: the two ends need not agree on dtype and shape.
        self.data, self.marks = bytes_of(buffer), marks
        self.done = False
        self.record()

    def wait(self) -> None:
        """Return once the buffer may be used; on CUDA, by the current stream."""
        self._rank._wait(self)
        self.follow()

    def record(self) -> None:
        """Mark the work that the buffer's device has so far; the CPU has always finished it."""
        on_cuda = self.data.is_cuda
        self.mark = torch.cuda.current_stream(self.data.device).record_event() if on_cuda else None

    def follow(self) -> None:
        """Let further work of the buffer's device wait for the mark."""
        if self.mark is not None:
            torch.cuda.current_stream(self.data.device).wait_event(self.mark)

    def __str__(self) -> str:
        return self._what


def _copy(channel: Channel, sent: _Message, awaited: _Message) -> None:
    sizes = [counted(end.data.nbytes, "byte") for end in (sent, awaited)]
    if sizes[0] != sizes[1]:
        raise TransportError(f"{channel}: {sizes[0]} sent, but {sizes[1]} expected")
    sent.follow()
    awaited.follow()
    # Not no_grad: a buffer made in inference mode can be written to in inference mode only.
    with torch.inference_mode():
        awaited.data.copy_(sent.data)
    if isinstance(awaited.marks, bytearray):
        awaited.marks[:] = sent.marks
    for message in (sent, awaited):
        message.record()
        message.done = True
