"""Cuts a model into stages, or takes those of a user; wraps them in DDP or FSDP2."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from taktline import split
from taktline.checkpoint.model_state import ModelState, uses_in
from taktline.checkpoint.pretrained import Conversions
from taktline.device import keep_generators
from taktline.errors import MismatchError, PartitionError, TaktlineError, text_of
from taktline.plan import Plan
from taktline.split import Pipe
from taktline.split.arguments import without_padding
from taktline.split.auto import divide
from taktline.split.by_names import as_call
from taktline.split.costs import Measure
from taktline.split.recorded_stage import with_own_tables
from taktline.stage.grad_sync import sync_of
from taktline.text import counted
from taktline.train.ranks import Ranks
from taktline.train.stage_table import with_copied_buffers
from taktline.transport import Transport
from taktline.transport.exchange import share_values

Model: TypeAlias = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]
"""A model, a list of its stages, or the stages of this process by their numbers."""


def stages_in(model: Model, cuts: Sequence[str] | None) -> int | None:
    """How many stages a model is cut into by the user; None if that is open."""
    if cuts is not None:
        return len(cuts) + 1
    if isinstance(model, Pipe):
        return model.num_stages
    if isinstance(model, Sequence):
        return len(model)
    return None


def take_apart(
    model: Model,
    plan: Plan,
    example: Any,
    cuts: Sequence[str] | None,
    measure: Measure | None = None,
) -> dict[int, nn.Module]:
    """All stages of a model, or those that were given.

    ``measure`` returns the times of layers to cut by; without it, their costs are counted.
    """
    if isinstance(model, Mapping):
        return _checked(dict(model), plan)
    stages = _stages(model, plan, example, cuts, measure)
    if len(stages) != plan.stages:
        raise PartitionError(
            f"the model has {counted(len(stages), 'stage')}, but {plan.name} on "
            f"{counted(plan.ranks, 'rank')} runs {plan.stages}; cut it into {plan.stages}"
        )
    return _checked(dict(enumerate(stages)), plan)


def state_of(model: Model, modules: dict[int, nn.Module], transport: Transport) -> ModelState:
    """The state of a model in these stages; if other processes have the others, all take part."""
    if isinstance(model, Mapping):
        shape, own = [(int, str, bool)], uses_in(modules)
        listed = share_values(transport, own, shape, "Pipeline(…)", what="the stages")
        return ModelState.of_stages(modules, itertools.chain(*listed))
    if isinstance(model, nn.Module) and not isinstance(model, Pipe):
        state = ModelState.of_model(model, modules)
        state.conversions = Conversions.of(model)
        return state
    return ModelState.of_stages(modules)


def _stages(
    model: Model,
    plan: Plan,
    example: Any,
    cuts: Sequence[str] | None,
    measure: Measure | None,
) -> Sequence[nn.Module]:
    if isinstance(model, Pipe):
        return split.by_hand(map(model.get_stage_module, range(model.num_stages)))
    if isinstance(model, Sequence):
        return split.by_hand(model)
    if not isinstance(model, nn.Module):
        raise PartitionError(
            f"a model is an nn.Module, a list of stages or a dict of them, not {model!r}"
        )
    if plan.stages == 1 and not cuts:
        return [model]
    is_own = cuts is None and example is None
    example = own_example(model) if is_own else example
    if cuts is None and example is None:
        raise _no_example(model, plan)
    try:
        if cuts is not None:
            return split.by_names(model, cuts, example=example)
        return divide(model, plan.stages, example, measure)
    except Exception as error:  # the model's code runs there
        if is_own and _is_from_the_model(error):
            raise _no_example(model, plan) from error
        better = _explained(error, model, example)
        if better is error:
            raise
        raise better from better.__cause__


def _no_example(model: nn.Module, plan: Plan) -> PartitionError:
    return PartitionError(
        f"to cut {type(model).__name__} into {plan.stages} stages, pass example=(…), the "
        "arguments of one micro-batch, or cuts=[…], the names of the submodules at which new "
        "stages begin"
    )


def _checked(modules: dict[int, nn.Module], plan: Plan) -> dict[int, nn.Module]:
    for stage, module in modules.items():
        if not isinstance(module, nn.Module):
            raise PartitionError(f"stage {stage} is {module!r}, not an nn.Module")
        if stage not in range(plan.stages):
            raise PartitionError(
                f"there is no stage {stage}: {plan.name} on {counted(plan.ranks, 'rank')} has "
                f"stages 0 to {plan.stages - 1}"
            )
    return modules


def kept(modules: Mapping[int, nn.Module], stages: Sequence[int]) -> dict[int, nn.Module]:
    """These stages only."""
    if missing := sorted(set(stages) - set(modules)):
        raise PartitionError(
            f"the plan puts stages {sorted(stages)} here, but {missing} are not among those "
            f"passed: {sorted(modules)}"
        )
    return {stage: modules[stage] for stage in stages}


def _explained(error: Exception, model: nn.Module, example: Any) -> TaktlineError:
    """The error to raise in place of an error in cutting a model."""
    name = type(model).__name__
    own = _own_error(model, example) if _is_from_the_model(error) else None
    if own is not None:
        own.__suppress_context__ = own.__suppress_context__ or own.__context__ is error
        better = PartitionError(
            f"{name} fails by itself on the example, without any pipeline: "
            f"{type(own).__name__}: {text_of(own)}; its traceback is above"
        )
        better.__cause__ = own
        return better
    if not isinstance(error, TaktlineError):
        better = PartitionError(
            f"{name} runs by itself, but not without data, as it is recorded to be cut: "
            f"{type(error).__name__}: {text_of(error)}. A layer may need the numbers in its "
            "buffers or arguments to know its sizes; trace the model with taktline.pipeline, or "
            "pass a list of stages, cut by hand"
        )
        better.__cause__ = error
        return better
    return error


def _is_from_the_model(error: Exception) -> bool:
    """Whether the model's own code has raised an error, or its cause."""
    cause = error.__cause__ or error.__context__
    return not isinstance(error, TaktlineError) or (
        cause is not None and not isinstance(cause, TaktlineError)
    )


def _own_error(model: nn.Module, example: Any) -> Exception | None:
    """The error that the model raises by itself; None if none, or if it has no data to run with."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if example is None or any(tensor.is_meta for tensor in tensors.values()):
        return None
    # Buffers and random numbers must stay as they are.
    state = with_copied_buffers(model)
    try:
        args, kwargs = as_call(model, example)
        devices = {tensor.device for tensor in tensors.values()}
        with keep_generators(devices), torch.enable_grad():
            functional_call(model, state, args, kwargs, tie_weights=False)
    except Exception as error:  # the user's code may raise anything
        return None if isinstance(error, TaktlineError) else error
    return None


_LENGTH = 128
"""Of a text: long enough for its layers to compute, and not only to begin."""


def own_example(model: nn.Module) -> Any:
    """Arguments by which a model can be cut; None if it does not say what it takes."""
    dummies, config = getattr(model, "dummy_inputs", None), getattr(model, "config", None)
    if not isinstance(dummies, dict):
        return None
    if getattr(model, "main_input_name", "") == "pixel_values":
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size or (0, 0)
        return (), {"pixel_values": torch.zeros(1, channels, height, width)}
    most = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    texts = {
        name: _lengthened(without_padding(model, each), most) for name, each in dummies.items()
    }
    return (), texts


def _lengthened(dummy: Any, length: int) -> Any:
    """Texts, repeated up to a length; other values as they are."""
    if not isinstance(dummy, torch.Tensor) or dummy.ndim != 2 or dummy.is_floating_point():
        return dummy
    return dummy.repeat(1, -(-length // dummy.shape[1]))[:1, :length]


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
