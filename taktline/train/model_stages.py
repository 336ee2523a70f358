"""The stages of a model that are in this process, with the names that the model has for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from taktline import split
from taktline.checkpoint.holding import Held, priority_of, state_of
from taktline.checkpoint.names import joined, same, tied_names
from taktline.errors import PartitionError
from taktline.plan import Plan
from taktline.split import Pipe
from taktline.stage.ties import declared
from taktline.text import counted
from taktline.train.refusal import explained
from taktline.transport import Transport
from taktline.transport.exchange import share_values

__all__ = ["Model", "Parts", "stages_in", "take_apart"]

Model: TypeAlias = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]
"""A model, a list of its stages, or the stages of this process by their numbers."""


@dataclass(slots=True)
class Parts:
    """The stages that are here, and the model's own names for what is in any stage."""

    modules: dict[int, nn.Module]
    """By stage."""
    prefixes: bool = False
    """Whether a name begins with the number of its stage, as names of stages repeat."""
    names: list[str] = field(default_factory=list)
    """The names in the model's state, in its order."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names in the model for what a stage knows by another name."""
    rest: dict[str, torch.Tensor] = field(default_factory=dict)
    """What belongs to the model's state, and to no stage."""

    def name(self, stage: int, name: str) -> str:
        """What the model calls something in a stage."""
        return f"{stage}.{name}" if self.prefixes else name

    def held(self) -> list[Held]:
        """The parameters and lasting buffers of all stages here, by their names in the model."""
        return [
            Held(self.name(stage, name), value, priority_of(value, stage))
            for stage, module in self.modules.items()
            for name, value in state_of(module).items()
        ]

    def first_names(self) -> dict[str, str]:
        """The later names of a weight that has several, and the one that the model lists first."""
        here = {name: value for name, value, _ in self.held()}
        ties = {tie for module in self.modules.values() for tie in declared(module)}
        uses = ([self.name(*use) for use in tie.uses] for tie in ties)
        alike: dict[str, set[str]] = {}
        for name, first in joined(same(here), self.aliases, tied_names(uses)).items():
            alike.setdefault(first, {first}).add(name)
        places = {name: place for place, name in enumerate(self.names)}
        return {
            name: min(names, key=lambda each: places.get(each, len(places)))
            for names in alike.values()
            for name in names
        }

    def keep(self, stages: Sequence[int]) -> None:
        """Drop all other stages."""
        if missing := sorted(set(stages) - set(self.modules)):
            raise PartitionError(
                f"the plan puts the stages {sorted(stages)} here, but {missing} are not among the "
                f"stages given, which are {sorted(self.modules)}"
            )
        self.modules = {stage: self.modules[stage] for stage in stages}


def stages_in(model: Model, cuts: Sequence[str] | None) -> int | None:
    """How many stages a model has by itself; None if that is open."""
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
    transport: Transport,
) -> Parts:
    """All stages of a model, or those that were given; all processes take part."""
    if isinstance(model, Mapping):
        parts = Parts(_checked(dict(model), plan))
        _note_names_of_all(parts, transport)
        return parts
    stages = _stages(model, plan, example, cuts)
    if len(stages) != plan.stages:
        raise PartitionError(
            f"the model has {counted(len(stages), 'stage')}, but {plan.name} on "
            f"{counted(plan.ranks, 'rank')} runs {plan.stages}; cut it into {plan.stages}"
        )
    parts = Parts(_checked(dict(enumerate(stages)), plan))
    if isinstance(model, nn.Module) and not isinstance(model, Pipe):
        _note_names_of_model(parts, model)
    else:
        _note_names_of_stages(parts)
    return parts


def _stages(
    model: Model, plan: Plan, example: Any, cuts: Sequence[str] | None
) -> Sequence[nn.Module]:
    if isinstance(model, Pipe):
        return [model.get_stage_module(stage) for stage in range(model.num_stages)]
    if isinstance(model, Sequence):
        return split.by_hand(model)
    if not isinstance(model, nn.Module):
        raise PartitionError(
            f"a model is an nn.Module, a list of stages or a dict of them, not {model!r}"
        )
    if plan.stages == 1 and not cuts:
        return [model]
    if cuts is None and example is None:
        raise PartitionError(
            f"to cut a {type(model).__name__} into {plan.stages} stages, pass example=(…), the "
            "arguments of one micro-batch, or cuts=[…], the names of the submodules at which new "
            "stages begin"
        )
    try:
        if cuts is not None:
            return split.by_names(model, cuts, example=example)
        return split.auto(model, plan.stages, example)
    except Exception as error:  # the model's code runs there
        told = explained(error, model, example, None if cuts else plan)
        if told is error:
            raise
        raise told from told.__cause__


def _checked(modules: dict[int, nn.Module], plan: Plan) -> dict[int, nn.Module]:
    for stage, module in modules.items():
        if not isinstance(module, nn.Module):
            raise PartitionError(f"stage {stage} is {module!r}, which is no nn.Module")
        if stage not in range(plan.stages):
            raise PartitionError(
                f"there is no stage {stage}: {plan.name} on {counted(plan.ranks, 'rank')} has "
                f"stages 0 to {plan.stages - 1}"
            )
    return modules


def _note_names_of_model(parts: Parts, model: nn.Module) -> None:
    """The model's own names, and what its state has beyond that of its stages."""
    state = state_of(model)
    # In the order of the model's own state, which may leave out or add something.
    parts.names = [name for name in model.state_dict() if name in state] or list(state)
    held = {name for module in parts.modules.values() for name in state_of(module)}
    known = {id(state[name]): name for name in state if name in held}
    for name in parts.names:
        if name in held:
            continue
        if id(state[name]) in known:
            parts.aliases[name] = known[id(state[name])]
        elif not state[name].is_meta:
            parts.rest[name] = state[name].detach()


def _note_names_of_stages(parts: Parts) -> None:
    """The names in the stages; with the number of the stage if two things have one name."""
    found: dict[str, set[int]] = {}
    states = {stage: state_of(module) for stage, module in parts.modules.items()}
    for state in states.values():
        for name, value in state.items():
            found.setdefault(name, set()).add(id(value))
    parts.prefixes = any(len(things) > 1 for things in found.values())
    _list_names(parts, {stage: list(state) for stage, state in states.items()})


def _note_names_of_all(parts: Parts, transport: Transport) -> None:
    """The same where each process knows only its own stages."""
    mine = [(stage, list(state_of(module))) for stage, module in parts.modules.items()]
    told = share_values(transport, mine, [(int, [str])], "Pipeline(…)", what="the stages")
    by_stage = {stage: names for stages in told for stage, names in stages}
    counts = Counter(name for names in by_stage.values() for name in names)
    ties = [tie for module in parts.modules.values() for tie in declared(module)]
    tied = {name for tie in ties for _, name in tie.uses}
    parts.prefixes = any(count > 1 and name not in tied for name, count in counts.items())
    _list_names(parts, by_stage)


def _list_names(parts: Parts, by_stage: Mapping[int, Sequence[str]]) -> None:
    names = [parts.name(stage, name) for stage in sorted(by_stage) for name in by_stage[stage]]
    parts.names = list(dict.fromkeys(names))
