"""Outputs of the last stage, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from taktline.sharding import is_sharded
from taktline.train.ranks import Ranks

__all__ = ["shared_output"]


def shared_output(output: Any, ranks: Ranks, owner: int) -> Any:
    """What the owner has, on all ranks of the pipeline; a tensor in shards arrives whole."""
    group = ranks.group
    if group is None or ranks.size == 1:
        return output
    here, source = group.rank() == owner, dist.get_global_rank(group, owner)
    leaves, tree = pytree.tree_flatten(output) if here else ([], None)
    leaves = [leaf.full_tensor() if is_sharded(leaf) else leaf for leaf in leaves]
    # Without their data, which follows by itself.
    kinds = [_Kind.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    told = [(kinds, tree)]
    dist.broadcast_object_list(told, source, group, device=ranks.device)
    kinds, tree = told[0]
    assert tree is not None  # the owner has told it
    values = []
    for place, kind in enumerate(kinds):
        if isinstance(kind, _Kind):
            value = leaves[place].contiguous() if here else kind.empty(ranks.device)
            dist.broadcast(value, source, group)
            values.append(value)
        else:
            values.append(kind)
    return output if here else pytree.tree_unflatten(values, tree)


class _Kind(tuple[torch.Size, torch.dtype]):
    """A tensor's shape and type."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kind:
        return cls((tensor.shape, tensor.dtype))

    def empty(self, device: torch.device) -> torch.Tensor:
        shape, dtype = self
        return torch.empty(shape, dtype=dtype, device=device)
