"""Wraps stages in DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taktline.errors import MismatchError
from taktline.split.traced.stage_module import StageModule
from taktline.train.ranks import Ranks

__all__ = ["Prepare", "wrapped"]

Prepare: TypeAlias = Callable[[nn.Module, int], nn.Module]
"""Makes a module and the number of its stage ready: compiles it, checkpoints, splits layers."""


def wrapped(module: nn.Module, ranks: Ranks, data_parallel: str | None) -> nn.Module:
    """A stage in DDP or FSDP2 over the data-parallel dimensions of the mesh."""
    mesh = ranks.mesh
    if data_parallel is None or mesh is None:
        return module
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module  # there is nothing to average
    if data_parallel == "ddp":
        if len(ranks.data_dims) != 1:
            raise MismatchError(
                f"ddp averages over one dimension of the mesh, not over {list(ranks.data_dims)}"
            )
        group = mesh[ranks.data_dims[0]].get_group()
        return DistributedDataParallel(module, process_group=group)
    return _sharded(module, ranks)


def _sharded(module: nn.Module, ranks: Ranks) -> nn.Module:
    """FSDP2, with each block of a list of layers gathered by itself."""
    from torch.distributed.fsdp import fully_shard

    assert ranks.mesh is not None  # see wrapped
    mesh = ranks.mesh[ranks.data_dims]
    # The modules of a traced stage hold parameters, and are never called.
    lists = [] if isinstance(module, StageModule) else list(module.modules())
    for layers in lists:
        if isinstance(layers, nn.ModuleList):
            for layer in layers:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module
