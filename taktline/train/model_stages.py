"""Cuts a model into stages, or takes the stages that a user has cut; explains why it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.func import functional_call

from taktline import split
from taktline.checkpoint.model_state import ModelState, uses_in
from taktline.checkpoint.pretrained import Conversions
from taktline.device import keep_generators
from taktline.errors import PartitionError, TaktlineError, text_of
from taktline.plan import Plan
from taktline.split import Pipe
from taktline.split.auto import divide
from taktline.split.by_names import as_call
from taktline.split.costs import Measure
from taktline.text import counted
from taktline.train.measure import with_copied_buffers
from taktline.train.own_example import own_example
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
        better = _explained(error, model, example, None if cuts else plan)
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


def _explained(
    error: Exception, model: nn.Module, example: Any, plan: Plan | None
) -> TaktlineError:
    """The error to raise in place of an error in cutting a model.

    ``plan`` has the number of stages, if the user has not said where to cut.
    """
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
    if plan is None or not (most := _most_stages(model, example, plan.stages)):
        return error
    return PartitionError(f"{error}; {_advice(most, plan)}")


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


def _most_stages(model: nn.Module, example: Any, stages: int) -> int:
    """The largest number of stages below this one that a model can be cut into; 0: unknown."""
    for fewer in range(stages - 1, 1, -1):
        try:
            split.auto(model, fewer, example)
        except Exception:  # the first error is the one to report
            continue
        return fewer
    return 0


def _advice(most: int, plan: Plan) -> str:
    """On how many ranks the model can run."""
    each = plan.stages // plan.ranks
    ranks = most // each
    if ranks > 1:
        return f"{plan.name} with {counted(each, 'stage')} per rank runs on up to {ranks} ranks"
    return f"1f1b, with one stage per rank, runs on up to {most} ranks"
