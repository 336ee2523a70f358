"""Where a process's part of a tensor lies in the whole: one box, with a start and a size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from taktline.errors import CheckpointError
from taktline.sharding import is_sharded, local

__all__ = ["Box", "shard_of"]


class Box(NamedTuple):
    """A part of a tensor: the first index and how many, along each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    def meets(self, other: Box) -> Box | None:
        """What two boxes have in common.

        >>> Box((0, 0), (4, 4)).meets(Box((2, 0), (4, 2)))
        Box(start=(2, 0), size=(2, 2))
        """
        start = tuple(map(max, self.start, other.start))
        mine, theirs = (map(sum, zip(*box, strict=True)) for box in (self, other))
        size = tuple(min(ends) - first for first, *ends in zip(start, mine, theirs, strict=True))
        return Box(start, size) if min(size, default=1) > 0 else None

    def inside(self, other: Box) -> tuple[slice, ...]:
        """Where this box is in a tensor that has the values of another one.

        >>> Box((2, 0), (2, 2)).inside(Box((2, 0), (4, 2)))
        (slice(0, 2, None), slice(0, 2, None))
        """
        return tuple(
            slice(first - base, first - base + count)
            for first, count, base in zip(self.start, self.size, other.start, strict=True)
        )


def shard_of(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Box]:
    """What this process has of a tensor, in place, and which part that is: all but for a DTensor.

    >>> shard_of(torch.ones(2, 3), "weight")[1]
    Box(start=(0, 0), size=(2, 3))
    """
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor, Box.whole(tensor.shape)
    try:
        chunks = tensor.__create_chunk_list__()
    except RuntimeError as error:  # a part of a sum
        raise CheckpointError(f"{name} cannot be saved or loaded as it lies: {error}") from error
    if len(chunks) != 1:
        raise CheckpointError(f"{name} has {len(chunks)} parts on this rank; only one can be saved")
    return local(tensor), Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))
