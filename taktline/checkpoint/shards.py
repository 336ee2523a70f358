"""The shard of a tensor in this process, and the region of the whole that it covers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from taktline.errors import CheckpointError
from taktline.sharding import is_sharded, local


class Region(NamedTuple):
    """A part of a tensor: the first index and how many, along each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def meets(self, other: Region) -> Region | None:
        """The region that two regions have in common.

        >>> Region((0, 0), (4, 4)).meets(Region((2, 0), (4, 2)))
        Region(start=(2, 0), size=(2, 2))
        """
        start = tuple(map(max, self.start, other.start))
        mine, theirs = (map(sum, zip(*region, strict=True)) for region in (self, other))
        size = tuple(min(ends) - first for first, *ends in zip(start, mine, theirs, strict=True))
        return Region(start, size) if min(size, default=1) > 0 else None

    def inside(self, other: Region) -> tuple[slice, ...]:
        """The slices of this region in a tensor that covers another one.

        >>> Region((2, 0), (2, 2)).inside(Region((2, 0), (4, 2)))
        (slice(0, 2, None), slice(0, 2, None))
        """
        return tuple(
            slice(first - base, first - base + count)
            for first, count, base in zip(self.start, self.size, other.start, strict=True)
        )


def overlap(regions: Sequence[Region]) -> bool:
    """Whether any two regions have something in common.

    >>> overlap([Region((0,), (2,)), Region((2,), (2,))])
    False
    >>> overlap([Region((0,), (2,)), Region((3,), (1,)), Region((1,), (1,))])
    True
    """
    ordered = sorted(regions)
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if one.start and other.start[0] >= one.start[0] + one.size[0]:
                break  # and so do all that follow
            if one.meets(other) is not None:
                return True
    return False


def shard_of(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Region]:
    """The shard of a tensor in this process, and its region; of a plain tensor, all of it."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor, Region((0,) * tensor.dim(), tuple(tensor.shape))
    try:
        chunks = tensor.__create_chunk_list__()
    except RuntimeError as error:  # a part of a sum
        raise CheckpointError(f"{name} cannot be saved or loaded in its layout: {error}") from error
    if len(chunks) != 1:
        raise CheckpointError(f"{name} has {len(chunks)} parts on this rank; only one can be saved")
    return local(tensor), Region(tuple(chunks[0].offsets), tuple(chunks[0].sizes))
