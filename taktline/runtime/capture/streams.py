"""Micro-batches of a captured step side by side, where that takes little memory.

Small operations leave most of a GPU idle. Micro-batches that are captured on different streams have
no order in the graph, except that gradients are added in turn::

    stream 0   F0 B0 + F2 B2  +  F4 …
    stream 1           F1 B1 +  F3 B3 …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby

import torch

from taktline.plan import Action, Kind
from taktline.runtime.capture.gradient_buffers import Adding

_MOST = 4
"""The most micro-batches side by side."""
_SHARE = 0.05
"""How much more memory they may take than one after the other, of all memory in use."""


@contextmanager
def side_by_side(
    actions: Sequence[Action], device: torch.device, adding: Adding | None
) -> Iterator[Streams]:
    """Inside, ``enter`` each action before it runs."""
    if adding is None or device.type != "cuda" or _keeps_casts() or not is_loop(actions):
        yield Streams()
        return
    streams = _SeveralStreams(device, adding)
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        yield streams
        streams.join()


def _keeps_casts() -> bool:
    """Whether weights are cast once for all micro-batches: in any block of autocast.

    Also in one that is off: stages may turn it on, and casts are kept until the outermost block.
    """
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def is_loop(actions: Sequence[Action]) -> bool:
    """Whether each micro-batch is trained on before the next one begins, and nothing is sent.

    >>> is_loop([Action(0, Kind.F, 0), Action(0, Kind.B, 0), Action(0, Kind.F, 1)])
    True
    >>> is_loop([Action(0, Kind.F, 0), Action(0, Kind.F, 1), Action(0, Kind.B, 0)])
    False
    """
    order = [microbatch for microbatch, _ in groupby(action.microbatch for action in actions)]
    kinds = {action.kind for action in actions}
    computes = all(kind.is_compute for kind in kinds)
    return computes and kinds != {Kind.F} and len(order) == len(set(order))


class Streams:
    """The streams of a capture: here, one."""

    @property
    def count(self) -> int:
        """How many micro-batches run side by side."""
        return 1

    def enter(self, action: Action) -> None:
        """Switch to the stream of an action."""


class _SeveralStreams(Streams):
    """As many as memory allows; the first micro-batch runs alone, and shows how much one takes."""

    def __init__(self, device: torch.device, adding: Adding) -> None:
        self._adding = adding
        self._device = device
        self._streams = [torch.cuda.current_stream(self._device)]
        self._most = 0
        """The memory in use between the first micro-batch's forward and its backward, in bytes."""
        self._microbatch: int | None = None
        self._ended = 0
        """How many micro-batches have ended."""

    @property
    def count(self) -> int:
        """How many micro-batches run side by side."""
        return len(self._streams)

    def enter(self, action: Action) -> None:
        """Switch to the stream of an action."""
        if self._microbatch is None:
            self._microbatch = action.microbatch
        elif action.microbatch != self._microbatch:
            self._microbatch = action.microbatch
            self._switch()
        elif not self._most and action.kind != Kind.F:
            self._most = torch.cuda.memory_allocated(self._device)

    def join(self) -> None:
        """Let the first stream wait for all others."""
        first, *others = self._streams
        for stream in others:
            first.wait_stream(stream)

    def _switch(self) -> None:
        self._adding.add()  # in the stream that has computed the gradients
        if not self._ended:
            self._open()
        self._ended += 1
        torch.cuda.set_stream(self._streams[self._ended % len(self._streams)])

    def _open(self) -> None:
        now = torch.cuda.memory_allocated(self._device)
        more = int(_SHARE * now) // max(1, self._most - now)
        for stream in _more_streams(self._device)[:more]:
            stream.wait_stream(self._streams[0])
            self._streams.append(stream)
        self._adding.in_turn = _InTurn()


class _InTurn:
    """Orders operations on several streams."""

    def __init__(self) -> None:
        self._latest: torch.Event | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        stream = torch.cuda.current_stream()
        if self._latest is not None:
            stream.wait_event(self._latest)
        yield
        self._latest = stream.record_event()


@cache
def _more_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The same for all captures: each stream has a workspace of its own for matrix products."""
    return [torch.cuda.Stream(device) for _ in range(_MOST - 1)]
