"""Gradients of replicated stages: DDP, FSDP2 and ``replicate`` communicate when the plan says.

::

    sync_of(module) ──▶ None       nothing is wrapped
                    ──▶ DDPSync    DistributedDataParallel, or the older ``replicate`` made from it
                    ──▶ FSDPSync   ``fully_shard``, or the newer ``replicate`` made from it
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taktline.errors import MismatchError
from taktline.stage.grad_sync.base import GradSync
from taktline.stage.grad_sync.ddp import DDPSync

__all__ = ["GradSync", "sync_of"]


def sync_of(module: nn.Module) -> GradSync | None:
    """The wrapper that averages the gradients of a module; None for a plain module."""

    def inside(*classes: Any) -> list[nn.Module]:
        return [each for each in module.modules() if isinstance(each, classes)]

    older = _loaded("torch.distributed._composable.replicate", "DDP")
    replicated = inside(DistributedDataParallel, older)
    sharded = inside(_loaded("torch.distributed.fsdp", "FSDPModule"))
    if inside(_loaded("torch.distributed.fsdp", "FullyShardedDataParallel")):
        raise MismatchError(
            "FullyShardedDataParallel gathers and reduces by itself, at the wrong time for a "
            "pipeline; use fully_shard instead"
        )
    if replicated and sharded:
        raise MismatchError(
            "it contains both DDP and fully_shard; wrap a stage with one of them (a mesh of two "
            "dimensions makes fully_shard replicate, too)"
        )
    if replicated:
        return DDPSync(replicated)
    if sharded:
        from taktline.stage.grad_sync.fsdp import FSDPSync

        return FSDPSync(module)
    return None


def _loaded(module: str, name: str) -> Any:
    """A class, if its module was imported; before, no object can be an instance."""
    return getattr(sys.modules.get(module), name, ())
