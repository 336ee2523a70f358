"""CUDA graphs: random numbers inside of them, and micro-batches side by side."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from itertools import groupby
from typing import Any
from weakref import WeakSet

import torch

from taktline.errors import ScheduleError
from taktline.plan import Action, Kind
from taktline.private import private
from taktline.runtime.capture.buffers import Adding
from taktline.stage.kinds import nothing_compiled

_MOST = 4
"""The most micro-batches side by side."""
_SHARE = 0.05
"""How much more memory they may take than one after the other, of all memory in use."""

# Without it, torch's own end of a capture has to do.
_end_allocating = private("torch._C._cuda_endAllocateToPool", "a failed capture", lambda *_: None)


class CudaGraphs:
    """Graphs of one GPU, which share a memory pool: results are copied before the next replay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = None
        self.alive: WeakSet[_CudaGraph] = WeakSet()

    def __call__(self) -> _CudaGraph:
        """A graph for a program."""
        return _CudaGraph(self)


class _CudaGraph:
    """The graph of a program, with random numbers like those of an eager step."""

    def __init__(self, graphs: CudaGraphs) -> None:
        self._graphs = graphs
        self._graph = torch.cuda.CUDAGraph()
        index = graphs.device.index
        index = torch.cuda.current_device() if index is None else index
        self._default = torch.cuda.default_generators[index]
        self._own = self._default.graphsafe_get_state()
        # Not the default state: a failed capture would leave it unusable.
        self._numbers = self._own.clone_state()

    def capture(self, run: Callable[[], None]) -> None:
        """Capture a run of the program; raises if that fails."""
        graphs, error = self._graphs, None
        if graphs.pool is None or not graphs.alive:  # a pool is freed with its last graph
            graphs.pool = torch.cuda.graph_pool_handle()
        self._graph.register_generator_state(self._numbers)
        with torch.cuda.device(graphs.device), _same_stream(), self._drawing(), _isolated():
            try:
                with torch.cuda.graph(
                    self._graph, pool=graphs.pool, capture_error_mode="thread_local"
                ):
                    try:
                        with _same_stream():
                            run()
                    except Exception as raised:
                        error = raised  # the capture must be ended in any case
            except Exception as raised:
                error = error or raised
                with suppress(RuntimeError):  # the allocator may still be in the capture
                    _end_allocating(torch.cuda.current_device(), graphs.pool)
            if error is not None:
                graphs.pool = None
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame, and to tensors of the step
        graphs.alive.add(self)

    def replay(self) -> None:
        """Run the program again."""
        self._numbers.set_state(self._own.get_state())
        self._graph.replay()
        self._own.set_state(self._numbers.get_state())

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Inside, the default generator has the state of the graph."""
        self._default.graphsafe_set_state(self._numbers)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(self._own)


def _same_stream() -> AbstractContextManager[Any]:
    """A block after which the stream is the same as before, also after an error."""
    return torch.cuda.stream(torch.cuda.current_stream())


@contextmanager
def _isolated() -> Iterator[None]:
    """A block that changes nothing outside of a graph; raises if it draws numbers on the CPU.

    Nothing is compiled: to measure and to load kernels does not go into a graph.
    Autocast casts weights anew: cached casts would not be part of the graph. No garbage is
    collected: an old graph among it would be freed, which ends a capture.
    """
    before, python, collects = torch.get_rng_state(), random.getstate(), gc.isenabled()
    torch.clear_autocast_cache()
    gc.disable()
    try:
        with nothing_compiled():
            yield
    finally:
        if collects:
            gc.enable()
        torch.clear_autocast_cache()
        drawn = random.getstate() != python or not torch.equal(torch.get_rng_state(), before)
        torch.set_rng_state(before)
        random.setstate(python)
    if drawn:
        raise ScheduleError("random numbers are drawn on the CPU, which a replay would not do")


class Streams:
    """The streams of a capture: micro-batches side by side, where that takes little memory.

    Small operations leave most of a GPU idle. Micro-batches that are captured on different streams
    have no order in the graph, except that gradients are added in turn::

        stream 0   F0 B0 + F2 B2  +  F4 …
        stream 1           F1 B1 +  F3 B3 …

    The first micro-batch runs alone, and shows how much memory one takes.
    """

    def __init__(self, device: torch.device, adding: Adding, *, several: bool) -> None:
        """With ``several``, if the program :func:`is_loop`, there may be more than one."""
        self._several = several and device.type == "cuda" and not _keeps_casts()
        self._device = device
        self._adding = adding
        self._streams: list[torch.cuda.Stream] = []
        self._most = 0
        """The memory in use between the first micro-batch's forward and its backward, in bytes."""
        self._microbatch: int | None = None
        self._ended = 0
        """How many micro-batches have ended."""
        self._latest: torch.Event | None = None
        """After the latest addition of gradients."""

    @property
    def count(self) -> int:
        """How many micro-batches run side by side."""
        return max(1, len(self._streams))

    def enter(self, action: Action) -> None:
        """Switch to the stream of an action."""
        if not self._several:
            return
        if self._microbatch is None:
            self._microbatch = action.microbatch
        elif action.microbatch != self._microbatch:
            self._microbatch = action.microbatch
            self._switch()
        elif not self._most and action.kind != Kind.F:
            self._most = torch.cuda.memory_allocated(self._device)

    def join(self) -> None:
        """Let the first stream wait for all others, and go back to it."""
        for stream in self._streams[1:]:
            self._streams[0].wait_stream(stream)
        if self._streams:
            torch.cuda.set_stream(self._streams[0])
        self._adding.in_turn = nullcontext  # else the two would keep each other, and the buffers

    def _switch(self) -> None:
        self._adding.add()  # in the stream that has computed the gradients
        if not self._ended:
            self._open()
        self._ended += 1
        torch.cuda.set_stream(self._streams[self._ended % len(self._streams)])

    def _open(self) -> None:
        now = torch.cuda.memory_allocated(self._device)
        more = int(_SHARE * now) // max(1, self._most - now)
        self._streams = [torch.cuda.current_stream(self._device)]
        for stream in _more_streams(self._device)[:more]:
            stream.wait_stream(self._streams[0])
            self._streams.append(stream)
        self._adding.in_turn = self._in_turn

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Inside, operations run after those of all earlier blocks."""
        stream = torch.cuda.current_stream()
        if self._latest is not None:
            stream.wait_event(self._latest)
        yield
        self._latest = stream.record_event()


def is_loop(actions: Sequence[Action]) -> bool:
    """Whether each micro-batch is trained on before the next one begins, and nothing is sent.

    >>> is_loop([Action(0, Kind.F, 0), Action(0, Kind.B, 0), Action(0, Kind.F, 1)])
    True
    >>> is_loop([Action(0, Kind.F, 0), Action(0, Kind.F, 1), Action(0, Kind.B, 0)])
    False
    """
    order = [microbatch for microbatch, _ in groupby(action.microbatch for action in actions)]
    kinds = {action.kind for action in actions}
    computes = all(kind.is_compute and kind != Kind.RECOMPUTE for kind in kinds)
    return computes and kinds != {Kind.F} and len(order) == len(set(order))


def _keeps_casts() -> bool:
    """Whether weights are cast once for all micro-batches: in any block of autocast.

    Also in one that is off: stages may turn it on, and casts are kept until the outermost block.
    """
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


@cache
def _more_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The same for all captures: each stream has a workspace of its own for matrix products."""
    return [torch.cuda.Stream(device) for _ in range(_MOST - 1)]
