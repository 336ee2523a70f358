"""CUDA graphs, and random numbers inside of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any, Protocol
from weakref import WeakSet

import torch

from taktline.errors import ScheduleError, StageError
from taktline.private import private
from taktline.runtime.bind import Binding
from taktline.runtime.random_numbers import LOSS, RankRandom, seed_of

_SET_BACK = (
    "its backward sets random numbers back, as checkpoint() does, which a graph with seed=… cannot "
    "do; leave out seed, or pass preserve_rng_state=False to checkpoint()"
)
_APART = 2**62
"""A seed that users do not choose."""

# Without it, torch's own end of a capture has to do.
_end_allocating = private("torch._C._cuda_endAllocateToPool", "a failed capture", lambda *_: None)


class Graph(Protocol):
    """A captured program."""

    def replay(self, number: int) -> None:
        """Run the program again, in the training step of this number."""
        ...


class Graphs(Protocol):
    """Makes graphs."""

    def refusal(self) -> str | None:
        """Why there can be no graphs; None if there can."""
        ...

    def capture(self, binding: Binding, make: Callable[[Binding], Callable[[], None]]) -> Graph:
        """Capture the function that ``make`` returns for a binding; raises if that fails."""
        ...


class CudaGraphs:
    """Graphs of one GPU, which share a memory pool: results are copied before the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._alive: WeakSet[_Captured] = WeakSet()

    def refusal(self) -> str | None:
        """Why there can be no graphs; None if there can."""
        return None if self._device.type == "cuda" else f"the stages compute on {self._device}"

    def capture(self, binding: Binding, make: Callable[[Binding], Callable[[], None]]) -> Graph:
        """Capture the function that ``make`` returns for a binding."""
        draws = _Draws(binding, self._device)
        run = make(draws.binding)
        graph = torch.cuda.CUDAGraph()
        for generator in draws.generators:
            graph.register_generator_state(generator)
        if self._pool is None or not self._alive:  # a pool is freed with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        with (
            torch.cuda.device(self._device),
            draws.drawing(),
            _fresh_casts(),
            _undrawn(),
            _uncollected(),
        ):
            self._run(graph, run)
        captured = _Captured(graph, draws)
        self._alive.add(captured)
        return captured

    def _run(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        """Capture a function."""
        error: Exception | None = None
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                try:
                    run()
                except Exception as raised:
                    error = raised  # the capture must be ended in any case
        except Exception as raised:
            error = error or raised
            with suppress(RuntimeError):  # the allocator may still be in the capture
                _end_allocating(torch.cuda.current_device(), self._pool)
        if error is None:
            return
        self._pool = None
        try:
            if "set_current_seed" in str(error):
                where = f"stage {error.stage}: " if isinstance(error, StageError) else ""
                raise ScheduleError(f"{where}{_SET_BACK}")
            raise error
        finally:
            del error  # and with it the tensors of the step: its traceback refers to this frame


@contextmanager
def _undrawn() -> Iterator[None]:
    """Raise if the block draws random numbers on the CPU, and restore the generator."""
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        drawn = not torch.equal(torch.default_generator.get_state(), before)
        torch.default_generator.set_state(before)
    if drawn:
        raise ScheduleError("random numbers are drawn on the CPU, which a replay would not do")


@contextmanager
def _fresh_casts() -> Iterator[None]:
    """Inside, autocast casts all weights: cached casts would not be part of the graph."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, no garbage is collected: a graph among it would be freed, which ends a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Captured:
    def __init__(self, graph: torch.cuda.CUDAGraph, draws: _Draws) -> None:
        self._graph = graph
        self._draws = draws

    def replay(self, number: int) -> None:
        """Run the graph."""
        self._draws.before(number)
        self._graph.replay()
        self._draws.after()


class _Draws:
    """The random numbers of a captured program: the same as in an eager step.

    Each source of numbers (a rank of several in this process; with a seed, a stage or the loss for
    a micro-batch) has a generator in the graph.
    """

    def __init__(self, binding: Binding, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._default = torch.cuda.default_generators[index]
        self._own = self._default.graphsafe_get_state()
        # Not the default state: a failed capture would leave it unusable.
        self._now = self._caller = self._own.clone_state()
        self._seed = binding.seed
        self._random = binding.drawing if isinstance(binding.drawing, RankRandom) else None
        ranks = 0 if self._random is None else self._random.ranks
        self._of_rank = [torch.Generator(device) for _ in range(ranks)]
        self._of_call: dict[tuple[int, int], torch.Generator] = {}
        if binding.seed is not None:
            calls = product((*binding.stages, LOSS), range(binding.plan.microbatches))
            self._of_call = {call: torch.Generator(device) for call in calls}
        for number, generator in enumerate([*self._of_rank, *self._of_call.values()]):
            # Different ones in a capture: torch refuses to set one back to another one's numbers.
            generator.manual_seed(_APART + number)
        drawing = binding.drawing if self._random is None else _RankDraws(self, self._random)
        self.binding = replace(binding, drawing=drawing, seeded=self._seeded)

    @property
    def generators(self) -> list[torch.Generator]:
        """All generators of the graph."""
        return [self._caller, *self._of_rank, *self._of_call.values()]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the default generator has the state of the graph."""
        self._default.graphsafe_set_state(self._caller)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(self._own)

    def switch(self, rank: int) -> None:
        """Draw for another rank from now on."""
        self._now = self._of_rank[rank]
        self._default.graphsafe_set_state(self._now)

    def before(self, number: int) -> None:
        """Before a replay: set all generators, for the training step of this number."""
        if self._random is not None:
            self._random.switch(self._random.ranks)  # to the caller: no rank is running
            *_, (*states, _) = self._random.states()
            for generator, state in zip(self._of_rank, states, strict=True):
                generator.set_state(state)
        self._caller.set_state(self._own.get_state())
        if self._seed is not None:
            for call, generator in self._of_call.items():
                generator.manual_seed(seed_of((self._seed, number, *call)))

    def after(self) -> None:
        """After a replay: read the states of all generators."""
        self._own.set_state(self._caller.get_state())
        if self._random is not None:
            states = self._random.states()
            states[-1][:-1] = [generator.get_state() for generator in self._of_rank]
            self._random.set_states(states)

    @contextmanager
    def _seeded(self, key: tuple[int, int, int, int], device: torch.device) -> Iterator[None]:
        """Inside, draw for a stage and a micro-batch."""
        _, _, stage, microbatch = key
        self._default.graphsafe_set_state(self._of_call[stage, microbatch])
        yield
        self._default.graphsafe_set_state(self._now)


class _RankDraws(RankRandom):
    """The numbers of ranks that share a thread, in a graph."""

    def __init__(self, graph: _Draws, random: RankRandom) -> None:
        self.ranks, self.draws = random.ranks, random.draws
        self._graph = graph

    def switch(self, rank: int) -> None:
        """Draw for another rank from now on."""
        self._graph.switch(rank)
