"""The tensors of a model in this process, by the model's names, and the processes that have all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, Self

import torch
from torch import nn

from taktline.errors import CheckpointError, JsonError, MismatchError, TaktlineError, text_of
from taktline.runtime.schedule import Schedule
from taktline.runtime.watchdog import guarded
from taktline.stage.names import declared, named_state
from taktline.transport import Transport, transport_of
from taktline.transport.base import Alone
from taktline.transport.exchange import restored, retold, share_values, written


class Processes:
    """The processes along each dimension of a mesh, which save and load together."""

    def __init__(self, transports: Sequence[Transport] = (Alone(),)) -> None:
        self.transports = transports
        self.sizes = [transport.size for transport in transports]
        """How many processes there are along each dimension."""
        self.count = prod(self.sizes)
        self.place = 0
        """The number of this process."""
        for transport in reversed(transports):
            self.place = self.place * transport.size + transport.rank

    def attempt(self, do: Callable[[], Any], what: str) -> tuple[Any, TaktlineError | None]:
        """The result of a function, or the error of a disk or a user's code, with the rank."""
        try:
            return do(), None
        except Exception as error:
            text = text_of(error)
            if not isinstance(error, TaktlineError):
                text = f"cannot {what}: {type(error).__name__}: {text}"
            if self.count > 1 and not text.startswith("rank "):
                text = f"rank {self.place}: {text}"
            if isinstance(error, TaktlineError) and not isinstance(error, JsonError):
                return None, retold(error, text)
            found = CheckpointError(text)
            found.__cause__ = error
            return None, found

    def everywhere(self, do: Callable[[], Any], what: str, call: str) -> list[Any]:
        """The results of all processes, as JSON, in the order of their numbers.

        An error of one is raised on all, and so is one about processes in different calls.
        """
        result, error = self.attempt(do, what)
        if self.count == 1:
            if error is not None:
                raise error
            return json.loads(json.dumps([result]))
        text = "" if error is None else written(error)
        rows = [[text, result]]
        for transport in self.transports:
            try:
                shared = share_values(transport, rows, [(str, object)], call, what=call)
                rows = [row for each in shared for row in each]
            except MismatchError as different:  # other dimensions must know
                error, text = different, written(different)
                rows = [[text, None]]
        for place, (other, _) in enumerate(rows):
            if other:
                raise error if error is not None and other == text else restored(other, place)
        return [each for _, each in rows]


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
    conversions: Any = None
    """How files have the tensors of a model of transformers, see ``pretrained.py``."""
    processes: Processes = field(default_factory=Processes)
    """Those that have the whole model."""
    schedule: Schedule | None = None
    """Runs the stages, if there is one."""
    loaders: int = 0
    """How many loaders this process reads just now."""
    resumes: bool = False
    """Whether it read one when the state was saved that it has loaded."""

    @classmethod
    def of_model(cls, model: nn.Module, modules: dict[int, nn.Module] | None = None) -> Self:
        """The state of a model that was cut into these stages, or of one that is whole."""
        state = named_state(model)
        if modules is None:
            return cls({0: model}, list(state))
        # In the order of the model's own state_dict(), which may leave out or add something.
        names = [name for name in model.state_dict() if name in state] or list(state)
        found = cls(modules, names)
        held = {name for module in modules.values() for name in named_state(module)}
        known = {id(state[name]): name for name in state if name in held}
        for name in names:
            if name not in held and id(state[name]) in known:
                found.aliases[name] = known[id(state[name])]
            elif name not in held and not state[name].is_meta:
                found.rest[name] = state[name].detach()
        return found

    @classmethod
    def of_stages(
        cls, modules: dict[int, nn.Module], processes: Processes | None = None, call: str = ""
    ) -> Self:
        """The state of stages that were cut by hand; ``processes`` have others, and call this, too.

        Names begin with the number of the stage if two stages have different tensors under one
        name. Between processes, a parameter is the same one if it is tied, and a buffer always.
        """
        ties = {tie for module in modules.values() for tie in declared(module)}
        homes = {use: tie.uses[0][0] for tie in ties for use in tie.uses}
        first: dict[int, int] = {}
        uses: list[Any] = []  # each stage, a name in it, and the first stage that has the same
        for stage, module in modules.items():
            for name, value in named_state(module).items():
                home = homes.get((stage, name), first.setdefault(id(value), stage))
                everywhere = processes is not None and not isinstance(value, nn.Parameter)
                uses.append((stage, name, -1 if everywhere else home))
        if processes is not None:
            listed = processes.everywhere(lambda: uses, call, call)
            uses = [use for process in listed for use in process]
        uses.sort(key=lambda use: use[0])
        different = {(name, home) for _, name, home in uses}
        found = cls(modules, prefixes=len(different) > len({name for name, _ in different}))
        found.names = list(dict.fromkeys(found.name(stage, name) for stage, name, _ in uses))
        return found

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> Self:
        """The stages of a schedule on this rank; all processes of the job take part."""
        runner = schedule._runner
        world = transport_of(None, runner.device)
        # There may be other pipelines beside this one.
        wider = not runner.all_ranks and world.size > runner.transport.size
        processes = Processes([world if wider else runner.transport])
        modules = {stage.stage_index: stage.submod for stage in schedule._stages}
        found = cls.of_stages(modules, processes, "the names of a checkpoint")
        found.processes, found.schedule = processes, schedule
        return found

    @contextmanager
    def together(self, call: str) -> Iterator[str]:
        """A call that all ranks of all replicas make; raises if they make others.

        Shards of FSDP2 are put back first: an evaluation may have left them gathered.
        """
        alone = self.processes.count == 1
        with nullcontext() if alone else guarded(self.processes.transports[0], call):
            if self.schedule is not None:
                self.schedule._runner.arrive(call)
            kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
            for inner in self.inner_modules():
                if isinstance(inner, kind):
                    inner.reshard()  # pyright: ignore[reportCallIssue]
            yield call

    def inner_modules(self) -> Iterator[nn.Module]:
        """All modules of the stages here."""
        return (inner for module in self.modules.values() for inner in module.modules())

    def name(self, stage: int, name: str) -> str:
        """The model's name for a tensor or a module of a stage."""
        return f"{stage}.{name}" if self.prefixes else name

    def held(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters and persistent buffers of all stages here, by their names in the model."""
        return [
            (self.name(stage, name), value)
            for stage, module in self.modules.items()
            for name, value in named_state(module).items()
        ]

    def saved(self) -> list[tuple[str, torch.Tensor]]:
        """The same, with one name for all uses of a tied weight.

        Of several tensors with one name, the first is saved. All are loaded.
        """
        first = self.first_names()
        return [(first.get(name, name), value) for name, value in self.held()]

    def first_names(self) -> dict[str, str]:
        """For each further name of a weight, the one that the model lists first."""
        first: dict[int, str] = {}
        same = {name: first.setdefault(id(value), name) for name, value in self.held()}
        tied = [
            {self.name(*use): self.name(*tie.uses[0]) for use in tie.uses[1:]}
            for module in self.modules.values()
            for tie in declared(module)
        ]
        return joined([same, self.aliases, *tied], self.names)


def first_of_each(held: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The first tensor of each name."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in held:
        found.setdefault(name, tensor)
    return found


def writers(listed: Sequence[Iterable[str]]) -> dict[str, int]:
    """The first process that lists each key.

    >>> writers([["embed", "norm"], ["norm", "head"]])
    {'norm': 0, 'head': 1, 'embed': 0}
    """
    return {key: place for place, keys in reversed(list(enumerate(listed))) for key in keys}


def joined(tables: Iterable[Mapping[str, str]], order: Iterable[str] = ()) -> dict[str, str]:
    """Tables of names that stand for other names, as one.

    Of all names that are alike, the one that comes first in ``order`` stands for the others.

    >>> joined([{"head": "embed"}, {"embed": "head", "out": "head"}])
    {'head': 'embed', 'out': 'embed'}
    >>> joined([{"head": "embed"}, {"out": "head"}], ["out", "embed"])
    {'embed': 'out', 'head': 'out'}
    """
    groups: dict[str, set[str]] = {}
    for name, known in (pair for table in tables for pair in table.items()):
        both = groups.get(name, {name}) | groups.get(known, {known})
        groups |= dict.fromkeys(both, both)
    places = {name: place for place, name in enumerate(order)}

    def place(name: str) -> tuple[int, str]:
        return places.get(name, len(places)), name

    first = {name: min(group, key=place) for name, group in groups.items()}
    return {name: first[name] for name in sorted(first) if name != first[name]}
