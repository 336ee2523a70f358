"""Random numbers that depend on what is computed, not on when or where."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import torch

__all__ = ["Seeded", "seed_of", "seeded"]

Seeded: TypeAlias = Callable[
    [tuple[int, int, int, int], torch.device], AbstractContextManager[None]
]
"""What :func:`seeded` is, or does the same in another way."""


def seed_of(key: tuple[int, int, int, int]) -> int:
    """The seed for a (seed, step, stage, micro-batch).

    >>> seed_of((0, 0, 0, 0)) != seed_of((0, 0, 0, 1))
    True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


@contextmanager
def seeded(key: tuple[int, int, int, int], device: torch.device) -> Iterator[None]:
    """Random numbers of a key inside; the generators go on as if nothing had been drawn.

    >>> cpu = torch.device("cpu")
    >>> with seeded((0, 0, 0, 0), cpu):
    ...     first = torch.rand(3)
    >>> with seeded((0, 0, 0, 0), cpu):
    ...     torch.equal(first, torch.rand(3))
    True
    """
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
