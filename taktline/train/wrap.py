"""Wraps the stages of a pipeline in DDP or FSDP2, over the replicas of its mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from taktline.errors import MismatchError
from taktline.split.recorded_stage import with_own_tables
from taktline.stage.grad_sync import sync_of
from taktline.train.ranks import Ranks

_CONTAINERS = nn.ModuleList, nn.ModuleDict
"""They have no forward, so they cannot be sharded by themselves."""


def separate(stages: Iterable[nn.Module]) -> None:
    """Give each stage its own copy of what an earlier one has, too: FSDP2 shards a module once.

    The copies have the same parameters, as other tied weights do before they are sharded.
    """
    seen: set[int] = set()  # own units of several stages are different objects with one __dict__
    for stage in stages:
        for module in [module for module in stage.modules() if id(vars(module)) not in seen]:
            for name, child in module._modules.items():
                if child is not None and id(vars(child)) in seen:
                    module._modules[name] = with_own_tables(child)
        seen |= {id(vars(module)) for module in stage.modules()}


def wrapped(module: nn.Module, ranks: Ranks, data_parallel: str | None) -> nn.Module:
    """A stage in DDP or FSDP2 over the data-parallel dimensions of the mesh."""
    if data_parallel is None or ranks.mesh is None:
        return module
    if not any(parameter.is_floating_point() for parameter in module.parameters()):
        return module  # without gradients to average, now and later
    if data_parallel == "ddp":
        if len(ranks.data_dims) != 1:
            raise MismatchError(
                f"ddp averages over one dimension of the mesh, not over {list(ranks.data_dims)}"
            )
        return _replicated(module, ranks.groups[ranks.data_dims[0]])
    return _sharded(module, ranks.mesh[ranks.data_dims])


def _replicated(module: nn.Module, group: ProcessGroup) -> nn.Module:
    """DDP, also around a frozen stage, which the user may unfreeze later."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return DistributedDataParallel(module, process_group=group)
    # DDP wants one that is trained; it keeps memory for its gradient.
    several = (parameter for parameter in module.parameters() if parameter.is_floating_point())
    smallest = min(several, key=torch.Tensor.numel)
    smallest.requires_grad_(True)
    try:
        return DistributedDataParallel(module, process_group=group)
    finally:
        smallest.requires_grad_(False)


def _sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, with each block of a list of layers gathered by itself."""
    from torch.distributed.fsdp import fully_shard

    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for path, layer in _layers(module):
        held = [name for parameter in layer.parameters() for name in names[parameter]]
        # What it shares with others is sharded with the stage: FSDP2 shards a parameter once.
        if held and all(name.startswith(path) for name in held):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers in lists, with their paths; not those inside of other layers."""
    for name, child in module.named_children():
        inside = f"{path}{name}."
        if isinstance(module, nn.ModuleList) and not isinstance(child, _CONTAINERS):
            yield inside, child
        else:
            yield from _layers(child, inside)


def require_wrapped(modules: Mapping[int, nn.Module], ranks: Ranks) -> None:
    """Raise if nothing averages the gradients of a stage over its replicas."""
    if ranks.replicas == 1:
        return
    for stage, module in modules.items():
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if trains and sync_of(module) is None:
            dims = ", ".join(map(repr, ranks.data_dims))
            raise MismatchError(
                f"the mesh has room for {ranks.replicas} replicas of stage {stage} ({dims}), and "
                'nothing averages their gradients; pass data_parallel="ddp" or "fsdp", or wrap it '
                "in prepare"
            )
