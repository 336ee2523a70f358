"""CUDA graphs, and random numbers inside of them."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

from taktline.errors import ScheduleError
from taktline.private import private

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

    Autocast casts weights anew: cached casts would not be part of the graph. No garbage is
    collected: an old graph among it would be freed, which ends a capture.
    """
    before, python, collects = torch.get_rng_state(), random.getstate(), gc.isenabled()
    torch.clear_autocast_cache()
    gc.disable()
    try:
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
