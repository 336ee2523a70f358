"""Builds a pipeline: ranks, plan, stages, wrapped in DDP or FSDP2, and schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from taktline.checkpoint.model_state import ModelState
from taktline.errors import MismatchError
from taktline.plan import Plan
from taktline.runtime import ScheduleFromPlan
from taktline.runtime.watchdog import guarded
from taktline.split import Pipe, materialise
from taktline.split.by_names import without_compiler
from taktline.split.recorded_stage import has_dynamic_shapes, with_own_tables
from taktline.split.traced.stage_module import StageModule
from taktline.stage import PipelineStage, compile_stages
from taktline.stage.names import named_parameters
from taktline.stage.ties import declared
from taktline.train.batch_dims import BatchDims
from taktline.train.choose_plan import ScheduleChoice, opened, plan_for
from taktline.train.model_stages import Model, keep, stages_in, take_apart
from taktline.train.ranks import Ranks, find_ranks
from taktline.train.stage_table import StageTable
from taktline.train.stale_optimizers import note_replaced

Prepare: TypeAlias = Callable[[nn.Module, int], nn.Module]
"""Returns the module to use for a stage, given its module and number."""
_CONTAINERS = nn.ModuleList, nn.ModuleDict
"""They have no forward, so they cannot be sharded by themselves."""


@dataclass(slots=True)
class Built:
    """A pipeline, ready to run."""

    ranks: Ranks
    plan: Plan
    model: ModelState
    """The stages of this process."""
    table: StageTable
    example: Any
    options: Mapping[str, Any]
    """Of the schedule."""
    schedule: ScheduleFromPlan = field(init=False)
    """Runs the ranks of this process."""
    batch_dims: BatchDims = field(init=False)

    def __post_init__(self) -> None:
        stages = [
            PipelineStage(
                module, stage, self.plan.stages, self.ranks.device, group=self.ranks.group
            )
            for stage, module in self.model.modules.items()
        ]
        self.schedule = ScheduleFromPlan(stages, self.plan, **self.options)
        if len(self.ranks.own) > 1:
            self.schedule._runner.run_all_ranks(self.ranks.size)
        # Keyword arguments are the model's, so every rank gets the same ones.
        self.schedule._compared = ("args", "kwargs", "target")
        self.batch_dims = BatchDims(self.example, self.schedule._cutter)
        self.schedule._cutter_for = self.batch_dims.fitted

    def copied(self, memo: dict[int, Any]) -> Built:
        """Another one with copies of all modules, where all ranks are in this process."""
        ranks = Ranks(self.ranks.size, device=self.ranks.device)
        made = replace(self, ranks=ranks, model=copy.deepcopy(self.model, memo))
        made.schedule.steps = self.schedule.steps
        return made

    def parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """The parameters of this process: stage, name in the model, and parameter."""
        for stage in sorted(self.model.modules):
            for name, parameter in named_parameters(self.model.modules[stage]).items():
                yield stage, self.model.name(stage, name), parameter

    def counted(self) -> dict[int, nn.Parameter]:
        """The parameters that count in a norm, by their places in the model, in its order.

        A tied weight counts in the first stage that uses it.
        """
        copies = {
            (stage, self.model.name(stage, name))
            for module in self.model.modules.values()
            for tie in declared(module)
            for stage, name in tie.uses[1:]
        }
        places = {name: place for place, name in enumerate(self.model.names)}
        found = {
            id(parameter): (places[name], parameter)
            for stage, name, parameter in self.parameters()
            if (stage, name) not in copies
        }
        return dict(sorted(found.values(), key=lambda each: each[0]))


def build(
    model: Model,
    example: Any,
    options: Mapping[str, Any],
    *,
    schedule: ScheduleChoice,
    microbatches: int | None,
    ranks: int | None,
    stages_per_rank: int | None,
    cuts: Sequence[str] | None,
    mesh: DeviceMesh | None,
    data_parallel: str | None,
    prepare: Prepare | None,
    compiles: bool,
    device: torch.device | None,
    seed: int | None,
    state_dict: Mapping[str, torch.Tensor] | None,
    timeout: timedelta | None,
) -> Built:
    """Cut the model, keep and move the stages of this process, and make the schedule.

    ``options`` are those of the schedule; for the others see :class:`taktline.Pipeline`.
    """
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        model = without_compiler(model)
    chosen = opened(schedule)
    given = named_parameters(model) if isinstance(model, nn.Module) else {}
    here = find_ranks(
        ranks,
        mesh,
        data_parallel,
        device or _device_of(model),
        default=chosen.ranks if isinstance(chosen, Plan) else 1,
        timeout=timeout,
    )
    plan = plan_for(
        chosen,
        ranks=here.size,
        microbatches=microbatches,
        stages=stages_in(model, cuts),
        stages_per_rank=stages_per_rank,
    )
    if here.in_one_process and isinstance(model, nn.Module) and not isinstance(model, Pipe):
        # As a whole, before it is cut: then it shares all tensors with its stages.
        materialise(model, here.device, state_dict=state_dict)
    options = {**options, "seed": None if seed is None else seed + here.replica}
    with guarded(here.transport, "Pipeline(…)"):
        state = take_apart(model, plan, example, cuts, here.transport)
        table = StageTable.of(plan, state.modules, example, here.transport)
        options["dynamic_shapes"] |= any(map(has_dynamic_shapes, state.modules.values()))
        keep(state, [stage for rank in here.own for stage in plan.placement.stages_of(rank)])
        _make_ready(state.modules, here, state_dict, prepare, data_parallel, compiles=compiles)
    built = Built(here, plan, state, table, example, options)
    here.made.keep_for(built.schedule, *state.modules.values())
    _require_wrapped(built)
    note_replaced(given, ((name, parameter) for _, name, parameter in built.parameters()))
    with guarded(here.transport, "Pipeline(…)"):
        built.schedule._runner.connect()
    return built


def _make_ready(
    modules: dict[int, nn.Module],
    ranks: Ranks,
    state_dict: Mapping[str, torch.Tensor] | None,
    prepare: Prepare | None,
    data_parallel: str | None,
    *,
    compiles: bool,
) -> None:
    """Give the stages of this process their values, and then prepare, compile and wrap them."""
    for module in modules.values():
        materialise(module, ranks.device, state_dict=state_dict)
    if data_parallel == "fsdp":
        _separate(modules.values())
    for stage, module in modules.items():
        ready = module if prepare is None else prepare(module, stage)
        if not isinstance(ready, nn.Module):
            raise MismatchError(
                f"prepare must return the module to use for stage {stage}, not {ready!r}"
            )
        if compiles:
            ready = compile_stages(ready, stage)
        modules[stage] = _wrapped(ready, ranks, data_parallel)


def _separate(stages: Iterable[nn.Module]) -> None:
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


def _wrapped(module: nn.Module, ranks: Ranks, data_parallel: str | None) -> nn.Module:
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
    # The modules of a traced stage hold parameters, and are never called.
    for path, layer in () if isinstance(module, StageModule) else _layers(module):
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


def _require_wrapped(built: Built) -> None:
    """Raise if nothing averages the gradients of a stage over its replicas."""
    if built.ranks.replicas == 1:
        return
    for stage in built.schedule._stages:
        trains = any(parameter.requires_grad for parameter in stage.submod.parameters())
        if trains and stage.grad_sync is None:
            dims = ", ".join(map(repr, built.ranks.data_dims))
            raise MismatchError(
                f"the mesh has room for {built.ranks.replicas} replicas of stage "
                f"{stage.stage_index} ({dims}), and nothing averages their gradients; pass "
                'data_parallel="ddp" or "fsdp", or wrap it in prepare'
            )


def _device_of(model: Model) -> torch.device | None:
    """The accelerator that the model lies on, if it does."""
    if isinstance(model, nn.Module):
        model = [model]
    modules = model.values() if isinstance(model, Mapping) else model
    for module in modules if isinstance(modules, Iterable) else ():
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            if parameter.device.type not in ("cpu", "meta"):
                return parameter.device
    return None
