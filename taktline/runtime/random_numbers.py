"""Random numbers: by a seed, wherever a stage runs; and separate for ranks in one thread."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch

_CALLER = -1
"""Stands for the caller's own numbers, among those of the ranks."""

LOSS = -1
"""Stands for ``loss_fn`` among the stages of seeds: its numbers do not depend on the cuts."""


def seed_of(key: tuple[int, int, int, int]) -> int:
    """The seed for a (seed, step, stage, micro-batch)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


@contextmanager
def seeded(key: tuple[int, int, int, int], device: torch.device) -> Iterator[None]:
    """Inside, random numbers depend on the key; afterwards the generators are as before."""
    seed = seed_of(key)
    if device.type == "cpu":
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type), device:
            torch.default_generator.manual_seed(seed)
            torch.get_device_module(device).manual_seed(seed)
            yield


class Drawing:
    """Finds out whether steps draw random numbers."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self.draws = False
        """Whether any step has drawn so far."""

    def states(self) -> list[list[torch.Tensor]]:
        """The state of each generator."""
        return [[generator.get_state()] for generator in self._generators]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compare the states before and after a step."""
        begun = self.states()
        try:
            yield
        finally:
            pairs = zip(chain(*begun), chain(*self.states()), strict=True)
            same = all(a is b or torch.equal(a, b) for a, b in pairs)
            self.draws = self.draws or not same


class RankRandom(Drawing):
    """Separate random numbers for ranks that share a thread: each draws as in its own process.

    Each rank continues its own numbers. Once the caller draws or seeds, all ranks start from the
    caller's state.

    >>> random = RankRandom(2, torch.device("cpu"))
    >>> with random.step():
    ...     random.switch(1)
    ...     first = torch.rand(())
    >>> torch.equal(first, torch.rand(()))
    True
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        super().__init__(device)
        self.ranks = ranks
        # Each generator with its state for each rank; the last state is the caller's.
        self._states = [(each, [each.get_state()] * (ranks + 1)) for each in self._generators]
        self._rank = _CALLER

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, ranks draw; afterwards the caller's generators are as before."""
        now = [generator.get_state() for generator in self._generators]
        before = [states[_CALLER] for _, states in self._states]
        if not all(map(torch.equal, now, before)):
            for (_, states), state in zip(self._states, now, strict=True):
                states[:] = [state] * len(states)
        with super().step():
            self.switch(0)  # draws between the ranks count as those of rank 0
            try:
                yield
            finally:
                self.switch(_CALLER)

    def states(self) -> list[list[torch.Tensor]]:
        """The states of each generator: one for each rank, and the caller's."""
        return [list(states) for _, states in self._states]

    def set_states(self, states: list[list[torch.Tensor]]) -> None:
        """Set all states, unless they are of another number of ranks."""
        if [len(each) for each in states] == [len(known) for _, known in self._states]:
            for (_, known), each in zip(self._states, states, strict=True):
                known[:] = each

    def switch(self, rank: int) -> None:
        """Draw for another rank from now on."""
        # Always: to compare the states would take longer.
        for generator, states in self._states:
            states[self._rank] = generator.get_state()
            generator.set_state(states[rank])
        self._rank = rank
