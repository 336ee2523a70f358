"""The ranks of a pipeline, which of them are in this process, and their process groups."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from taktline.checkpoint.model_state import Processes
from taktline.checks import check, launched
from taktline.device import gpu_for_each_process
from taktline.errors import MismatchError
from taktline.plan import Plan
from taktline.private import private
from taktline.stage.grad_sync import sync_of
from taktline.stage.streaming import Streamed
from taktline.text import counted
from taktline.transport import Transport, transport_of
from taktline.transport.base import Alone
from taktline.transport.communicators import default_group, timeout_of
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import share_floats
from taktline.transport.exit_hooks import meet
from taktline.transport.local import refuse_inside

PIPELINE = "pp"
_DATA = ("dp", "ddp", "fsdp")
"""The beginnings of names of data-parallel dimensions."""


class Ranks:
    """The ranks of a pipeline, and how this process talks to the others.

    >>> print(Ranks(2, device=torch.device("cpu")))
    2 ranks (in one process)
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        own_groups: Sequence[ProcessGroup] = (),
    ) -> None:
        """``own_groups`` are those of the mesh, if it was made for this pipeline."""
        self.size = size
        self.device = device
        self.mesh = mesh
        self._own_groups = own_groups
        names = () if mesh is None else mesh.mesh_dim_names or ()
        self.groups = {} if mesh is None else {name: mesh[name].get_group() for name in names}
        """By the names of the mesh's dimensions."""
        self.group = self.groups.get(PIPELINE)
        """Of the pipeline; None if all ranks are in this process."""
        self.own = tuple(range(size)) if self.group is None else (self.group.rank(),)
        """The ranks in this process."""
        self.in_one_process = len(self.own) == size
        self.data_dims = tuple(name for name in names if name.startswith(_DATA))
        """The data-parallel dimensions of the mesh, where stages have replicas."""
        self._others = [name for name in names if name != PIPELINE]
        self.is_first = not any(self.groups[name].rank() for name in self._others)
        """Whether this process comes first along all dimensions of the mesh but the pipeline's."""
        self._along = {name: transport_of(group, device) for name, group in self.groups.items()}
        self.transport: Transport = self._along.get(PIPELINE, Alone())
        """To the other processes of the pipeline."""
        self.processes = Processes([self.transport, *(self._along[n] for n in self._others)])
        """Along each dimension of the mesh, the pipeline first, also if this process is alone."""
        self.replicas, self.replica = 1, 0
        """How many replicas of the pipeline there are, and the number of this one."""
        for group in (self.groups[name] for name in self.data_dims):
            self.replicas *= group.size()
            self.replica = self.replica * group.size() + group.rank()

    @property
    def distributed(self) -> list[Distributed]:
        """The transports to other processes, along each dimension of the mesh."""
        return [each for each in self.processes.transports if isinstance(each, Distributed)]

    def stages_of(self, plan: Plan) -> list[int]:
        """The stages that a plan runs in this process."""
        return [stage for rank in self.own for stage in plan.placement.stages_of(rank)]

    def dims(self) -> Iterator[tuple[str, Transport]]:
        """What a process is called along each dimension of the mesh, and the transport there."""
        names = (PIPELINE, *self._others)
        for name, transport in zip(names, self.processes.transports, strict=True):
            noun = "rank" if name == PIPELINE else f"{name} rank"
            yield "replica" if name in self.data_dims else noun, transport

    def mean_of_replicas(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of a loss over the replicas."""
        if loss.device.type != "cpu":  # stays there, without waiting for its value
            total = loss.double()
            for name in self.data_dims:
                dist.all_reduce(total, group=self.groups[name])
            return (total / self.replicas).to(loss.dtype)
        mean = float(loss)
        for name in self.data_dims:
            numbers = numbers_of(self._along[name], mean, "the loss of replicas")
            mean = sum(numbers) / len(numbers)
        return torch.tensor(mean, dtype=loss.dtype, device="cpu")

    def on_any_rank(self, flag: bool, what: str) -> bool:
        """Whether a flag is set in any process of any replica."""
        return any(self.processes.everywhere(lambda: flag, what, what))

    def in_any_pipeline(self, flag: bool, what: str) -> bool:
        """Whether a flag is set in any pipeline of the mesh; all ranks of one have the same."""
        for name in self._others:
            flag = any(numbers_of(self._along[name], float(flag), what))
        return flag

    def close(self) -> None:
        """End the process groups that were made for this pipeline."""
        if self.group is not None:
            gc.collect()  # wrapped stages and their hooks hold each other, and connections
        groups, self._own_groups = self._own_groups, ()
        for group in groups:
            _end(group)
        if groups:
            forget_meshes()

    def __str__(self) -> str:
        where = "in one process" if self.in_one_process else "a process each"
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{counted(self.size, 'rank')} ({where}{replicas})"


def numbers_of(transport: Transport, number: float, what: str) -> list[float]:
    """The numbers of all ranks; ``what`` names the exchange, for errors."""
    return [shared for (shared,) in share_floats(transport, [number], what)]


def find_ranks(
    ranks: int | None,
    mesh: DeviceMesh | None,
    data_parallel: str | None,
    device: torch.device | None,
    *,
    default: int,
    timeout: timedelta | None,
) -> Ranks:
    """Find the ranks of a pipeline: in this process, or those that a launcher has started.

    ``default`` is how many there are in one process if ``ranks`` is None.
    """
    if ranks is not None:
        ranks = check("ranks", ranks, int, least=1, error=MismatchError)
    if mesh is None and _world() == 1:
        if data_parallel is not None:
            raise MismatchError(
                f"data_parallel={data_parallel!r} needs several processes, and this is the only "
                "one; start more with torchrun, or leave it out"
            )
        found = Ranks(ranks or default, device=device or torch.device("cpu"))
        if found.size > 1:
            refuse_inside()
        return found
    device = device or _device(mesh)
    if device.type != "cpu" and device.index is not None:
        torch.get_device_module(device).set_device(device)
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else None
        store, rank, size = meet(timeout or default_pg_timeout)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        atexit.register(_leave)
    own_groups: list[ProcessGroup] = []
    if mesh is None:
        mesh = _mesh(ranks, data_parallel, device)
        own_groups = [each for each in mesh.get_all_groups() if each is not dist.group.WORLD]
        for group in own_groups:
            group.set_timeout(timeout or timeout_of(default_group()))
    names = mesh.mesh_dim_names or ()
    if PIPELINE not in names:
        raise MismatchError(
            f"the mesh has no dimension {PIPELINE!r} for the pipeline, only {list(names)}; make it "
            f'with mesh_dim_names=("{PIPELINE}", "dp"), for example'
        )
    size = mesh[PIPELINE].size()
    if ranks not in (None, size):
        raise MismatchError(
            f"ranks is {ranks}, but the mesh has {size} in {PIPELINE!r}; leave out ranks"
        )
    found = Ranks(size, device=device, mesh=mesh, own_groups=own_groups)
    if data_parallel is not None and not found.data_dims:
        raise MismatchError(
            f"data_parallel={data_parallel!r}, but no dimension of the mesh {list(names)} is for "
            'data: name one "dp"'
        )
    if timeout is not None:
        for transport in found.distributed:
            transport.timeout = timeout
    return found


def _world() -> int:
    """How many processes there are, in the process group or by the launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def _device(mesh: DeviceMesh | None) -> torch.device:
    """The device of this process: the mesh's kind, else a GPU if there is one for each process."""
    if mesh is not None:
        kind = mesh.device_type
    else:
        over_gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        kind = "cpu" if over_gloo or not gpu_for_each_process() else "cuda"
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    index = torch.accelerator.current_device_index() if local_rank is None else int(local_rank)
    return torch.device(kind, index)


def _mesh(ranks: int | None, data_parallel: str | None, device: torch.device) -> DeviceMesh:
    """A mesh of all processes: one pipeline, or as many replicas as there is room for."""
    world = dist.get_world_size()
    size = ranks or world
    if world % size:
        raise MismatchError(
            f"ranks is {ranks}, but the launcher has started {world} processes; start as many, "
            "or leave out ranks"
        )
    if size < world and data_parallel is None:
        raise MismatchError(
            f"ranks is {ranks} of {world} processes, so there is room for {world // size} "
            'replicas of the pipeline: pass data_parallel="ddp" or "fsdp", or leave out ranks'
        )
    shape = (size, world // size) if data_parallel is not None else (size,)
    if _made:  # what forgets takes a third of a second to import
        forget_meshes()
    _made.append(shape)
    return init_device_mesh(device.type, shape, mesh_dim_names=(PIPELINE, "dp")[: len(shape)])


_made: list[tuple[int, ...]] = []
"""The shapes of all meshes that were made here, in this process."""


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


_abort = private(
    "torch.distributed.distributed_c10d._abort_process_group",
    "ending a group without waiting",
    dist.destroy_process_group,
)


def _end(group: ProcessGroup) -> None:
    Distributed.forget(group)
    with suppress(ValueError):  # the program has ended all groups itself
        if "nccl" in dist.get_backend_config(group):
            # Abort once its work is done: to destroy it, nccl would wait for the other ranks.
            torch.cuda.synchronize()
            _abort(group)
        else:
            dist.destroy_process_group(group)


def forget_meshes() -> None:
    """Let DTensor forget all meshes: it uses them for others that equal them, on each rank."""
    if "torch.distributed.tensor" in sys.modules:
        what = "a DTensor of a second pipeline"
        forget = private("torch.distributed.tensor.debug._clear_sharding_prop_cache", what, None)
        if forget is not None:
            forget()


def require_separate(modules: Mapping[int, nn.Module]) -> None:
    """Raise if stages of this process share a module: FSDP2 shards a module only once."""
    homes: dict[int, int] = {}
    for stage, root in modules.items():
        for name, module in root.named_modules():
            home = homes.setdefault(id(vars(module)), stage)
            if home != stage and any(True for _ in module.parameters()):
                raise MismatchError(
                    f"stages {home} and {stage} of this rank share the module {name}, which FSDP "
                    'can shard only once; pass data_parallel="ddp", or cut the model so that one '
                    "of them has it"
                )


def require_wrapped(modules: Mapping[int, nn.Module], ranks: Ranks) -> None:
    """Raise if nothing averages the gradients of a stage over its replicas."""
    for stage, module in modules.items():
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if trains and sync_of(module) is None:
            dims = ", ".join(map(repr, ranks.data_dims))
            raise MismatchError(
                f"the mesh has room for {ranks.replicas} replicas of stage {stage} ({dims}), and "
                'nothing averages their gradients; pass data_parallel="ddp" or "fsdp", or wrap it '
                "in prepare"
            )


def wrapped(
    module: nn.Module, ranks: Ranks, data_parallel: str | None, streamed: Streamed | None
) -> nn.Module:
    """A stage in DDP or FSDP2 over the data-parallel dimensions of the mesh."""
    if data_parallel is None or ranks.mesh is None:
        return module
    if not any(parameter.is_floating_point() for parameter in module.parameters()):
        return module  # without gradients to average, now and later
    if data_parallel == "fsdp":
        return _sharded(module, ranks.mesh[ranks.data_dims])
    if len(ranks.data_dims) != 1:
        raise MismatchError(
            f"ddp averages over one dimension of the mesh, not over {list(ranks.data_dims)}"
        )
    still = {id(each) for each in streamed.parameters.values()} if streamed else set[int]()
    if all(id(each) in still for each in module.parameters()):
        return module
    return _replicated(module, ranks.groups[ranks.data_dims[0]], still)


def _replicated(module: nn.Module, group: ProcessGroup, still: Container[int]) -> nn.Module:
    """DDP, also around a frozen stage, which the user may unfreeze later; ``still`` is left out."""
    if still:
        named = module.named_parameters(remove_duplicate=False)
        left_out: Any = [name for name, each in named if id(each) in still]
        module._ddp_params_and_buffers_to_ignore = left_out
    parameters = [each for each in module.parameters() if each.is_floating_point()]
    is_frozen = not any(each.requires_grad for each in parameters)
    # DDP wants one that is trained; it keeps memory for its gradient.
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.requires_grad_(smallest.requires_grad or is_frozen)
    try:
        return DistributedDataParallel(module, process_group=group)
    finally:
        smallest.requires_grad_(smallest.requires_grad and not is_frozen)


def _sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, with each block of a list of layers gathered by itself."""
    from torch.distributed.fsdp import fully_shard

    named = list(module.named_parameters(remove_duplicate=False))
    # What several layers share is sharded with the stage: FSDP2 shards a parameter once.
    if len(named) == len({parameter for _, parameter in named}):
        for layer in _layers(module):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers in lists; not those inside of other layers."""
    for child in module.children():
        # Containers have no forward, so they cannot be sharded by themselves.
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if isinstance(module, nn.ModuleList) and not is_container:
            yield child
        else:
            yield from _layers(child)
