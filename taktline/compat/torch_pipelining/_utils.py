"""What stages and schedules share."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.distributed.tensor import DTensor as DTensor
from torch.utils._pytree import tree_flatten, tree_map

from taktline.compat.torch_pipelining._metadata import *  # noqa: F403
from taktline.compat.torch_pipelining._validation import *  # noqa: F403
from taktline.errors import PlanError
from taktline.sharding import local
from taktline.split import PipeInfo as PipeInfo

logger = logging.getLogger("torch.distributed.pipelining._utils")


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """All leaves of a nesting; if detached, the nesting as well, with new tensors in both.

    >>> flatten_args((1, [2, {"a": 3}]))
    [1, 2, 3]
    """
    if not detach:
        return tree_flatten(args)[0]
    detached = tree_map(_detached, args)
    return detached, tree_flatten(detached)[0]


def flatten_args_detach(args: Any) -> Any:
    """The nesting with detached tensors, and its leaves.

    >>> flatten_args_detach((1, [2]))
    ((1, [2]), [1, 2])
    """
    return flatten_args(args, detach=True)


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def to_local_if_dtensor(tensor: torch.Tensor, detach: bool = False) -> torch.Tensor:
    """This rank's shard of a tensor, or all of it.

    >>> to_local_if_dtensor(torch.zeros(1))
    tensor([0.])
    """
    shard = local(tensor)
    return shard.detach() if detach else shard


def generate_stage_to_rank_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, int]:
    """The rank of each stage: round after round, or down the ranks and up again.

    >>> generate_stage_to_rank_mapping(2, 4), generate_stage_to_rank_mapping(2, 4, "v")
    ({0: 0, 1: 1, 2: 0, 3: 1}, {0: 0, 1: 1, 2: 1, 3: 0})
    """
    if style not in ("loop", "v"):
        raise PlanError(f"Style {style} is not supported.")
    if style == "v" and num_stages % pp_size:
        raise PlanError(
            f"num_stages {num_stages} must be evenly divisible by pp_size {pp_size} for V schedules"
        )
    ranks: dict[int, int] = {}
    for stage in range(num_stages):
        leg, place = divmod(stage, pp_size)
        ranks[stage] = pp_size - 1 - place if style == "v" and leg % 2 else place
    return ranks


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """The stages of each rank that has some.

    >>> generate_rank_to_stage_mapping(2, 4, "v")
    {0: [0, 3], 1: [1, 2]}
    """
    stages: dict[int, list[int]] = {}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        stages.setdefault(rank, []).append(stage)
    return stages
