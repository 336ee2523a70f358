"""The tensors of a model in this process, under the names that the model has for them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from taktline.checkpoint.conversions import Conversions
from taktline.checkpoint.processes import Processes
from taktline.runtime.schedule import Schedule
from taktline.stage.names import declared, named_buffers, named_parameters
from taktline.transport import transport_of


class Held(NamedTuple):
    """A parameter or a persistent buffer of this process."""

    name: str
    """In the model; of a tied weight, the one that stands for all."""
    tensor: torch.Tensor
    priority: int = 0
    """Of several tensors with one name, that with the highest is saved. All are loaded."""


@dataclass(slots=True)
class ModelState:
    """The stages of this process, and the model's own names for the tensors of all stages."""

    modules: dict[int, nn.Module]
    """By stage."""
    names: list[str] = field(default_factory=list)
    """The names in the model's state, in its order."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names in the model for tensors that a stage knows by another name."""
    rest: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors in the model's state that no stage has."""
    prefixes: bool = False
    """Whether a name begins with the number of its stage."""
    conversions: Conversions | None = None
    """How files have the tensors of a model of transformers."""

    @classmethod
    def of_model(cls, model: nn.Module, modules: dict[int, nn.Module]) -> Self:
        """The state of a model that was cut into these stages."""
        state = state_of(model)
        # In the order of the model's own state_dict(), which may leave out or add something.
        names = [name for name in model.state_dict() if name in state] or list(state)
        found = cls(modules, names, conversions=Conversions.of(model))
        held = {name for module in modules.values() for name in state_of(module)}
        known = {id(state[name]): name for name in state if name in held}
        for name in found.names:
            if name in held:
                continue
            if id(state[name]) in known:
                found.aliases[name] = known[id(state[name])]
            elif not state[name].is_meta:
                found.rest[name] = state[name].detach()
        return found

    @classmethod
    def of_stages(
        cls, modules: dict[int, nn.Module], gather: Callable[[list[Any]], list[Any]] | None = None
    ) -> Self:
        """The state of stages that were cut by hand.

        Names begin with the number of the stage if two stages have different tensors under one
        name. ``gather`` returns the values of all processes, if other stages are elsewhere. Then a
        parameter is the same one in two stages if it is tied, and a buffer always is.
        """
        held = [
            (stage, name, value)
            for stage, module in modules.items()
            for name, value in state_of(module).items()
        ]
        if gather is None:
            uses = [(stage, name, id(value)) for stage, name, value in held]
        else:
            ties = {tie for module in modules.values() for tie in declared(module)}
            tie_of = {use: tie for tie in ties for use in tie.uses}
            mine = [(stage, name, isinstance(value, nn.Parameter)) for stage, name, value in held]
            uses = [
                (stage, name, tie_of.get((stage, name), stage) if is_parameter else None)
                for stage, name, is_parameter in itertools.chain(*gather(mine))
            ]
        different = {(name, identity) for _, name, identity in uses}
        found = cls(modules, prefixes=len(different) > len({name for name, _ in different}))
        by_stage = sorted(uses, key=lambda use: use[0])
        found.names = list(dict.fromkeys(found.name(stage, name) for stage, name, _ in by_stage))
        return found

    def name(self, stage: int, name: str) -> str:
        """The model's name for a tensor or a module of a stage."""
        return f"{stage}.{name}" if self.prefixes else name

    def held(self) -> list[Held]:
        """The parameters and persistent buffers of all stages here, by their names in the model."""
        return [
            Held(self.name(stage, name), value, _priority(value, stage))
            for stage, module in self.modules.items()
            for name, value in state_of(module).items()
        ]

    def first_names(self) -> dict[str, str]:
        """For each further name of a weight, the one that the model lists first."""
        first: dict[int, str] = {}
        same = {name: first.setdefault(id(value), name) for name, value, _ in self.held()}
        tied = [
            {self.name(*use): self.name(*tie.uses[0]) for use in tie.uses[1:]}
            for module in self.modules.values()
            for tie in declared(module)
        ]
        return joined([same, self.aliases, *tied], self.names)


class HeldModel:
    """The tensors of a model that this process saves and loads, with those of other processes."""

    def __init__(
        self,
        state: ModelState,
        processes: Processes | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.state, self.schedule = state, schedule
        self.processes = processes or Processes()
        self.aliases = state.first_names()
        """Further names in the model of tensors, here or in another process."""
        first = self.aliases
        self.held = [each._replace(name=first.get(each.name, each.name)) for each in state.held()]

    @classmethod
    def of_model(cls, model: nn.Module) -> Self:
        """All of a model, without a pipeline."""
        return cls(ModelState({0: model}, list(state_of(model))))

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> Self:
        """The stages of a schedule on this rank; all processes of the job take part."""
        runner = schedule._runner
        world = transport_of(None, runner.device)
        # There may be other pipelines beside this one.
        wider = runner._random is None and world.size > runner.transport.size
        processes = Processes([world if wider else runner.transport])
        modules = {stage.stage_index: stage.submod for stage in schedule._stages}

        def gather(names: list[Any]) -> list[Any]:
            what = "the names of a checkpoint"
            return processes.everywhere(lambda: names, what, what)

        return cls(ModelState.of_stages(modules, gather), processes, schedule)

    def arrive(self, call: str) -> None:
        """Raise unless all ranks of all replicas are in the same call; then put shards back.

        An evaluation may have left those of FSDP2 gathered.
        """
        if self.schedule is not None:
            self.schedule._runner.arrive(call)
        kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        for inner in self.inner_modules():
            if isinstance(inner, kind):
                inner.reshard()  # pyright: ignore[reportCallIssue]

    def inner_modules(self) -> Iterator[nn.Module]:
        """All modules of the stages here."""
        return (inner for module in self.state.modules.values() for inner in module.modules())

    def parameter_names(self) -> dict[int, str]:
        """The model's name for each parameter, by its id."""
        return {id(held.tensor): held.name for held in self.held}


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a module, by their names in the user's model."""
    return {**named_parameters(module), **named_buffers(module, persistent=True)}


def foremost(held: Iterable[Held]) -> dict[str, Held]:
    """For each name, the tensor that is saved."""
    best: dict[str, Held] = {}
    for each in held:
        if each.name not in best or best[each.name].priority < each.priority:
            best[each.name] = each
    return best


def _priority(value: torch.Tensor, stage: int) -> int:
    """Which one of several tensors with one name is saved: that with the highest priority.

    The first stage stands for a tied weight. A buffer may be in several stages, too. Each forward
    may change it, and that of the last stage comes last.
    """
    return -stage if isinstance(value, nn.Parameter) else stage


def joined(tables: Iterable[Mapping[str, str]], order: Iterable[str] = ()) -> dict[str, str]:
    """Tables of names that stand for other names, as one.

    Of all names that are alike, the one that comes first in ``order`` stands for the others.

    >>> joined([{"head": "embed"}, {"embed": "head", "out": "head"}])
    {'head': 'embed', 'out': 'embed'}
    >>> joined([{"head": "embed"}, {"out": "head"}], ["out", "embed"])
    {'head': 'out', 'embed': 'out'}
    """
    places = {name: place for place, name in enumerate(order)}
    above: dict[str, str] = {}

    def first(name: str) -> str:
        while name in above:
            name = above[name]
        return name

    for name, known in (pair for table in tables for pair in table.items()):
        both = first(known), first(name)
        one, other = sorted(both, key=lambda each: places.get(each, len(places)))
        if one != other:
            above[other] = one
    return {name: first(name) for name in above}
