"""What a process holds of a model, and the processes that hold the rest of it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.checkpoint.names import joined, same, tied_names
from taktline.checks import Either, read
from taktline.errors import CheckpointError, MismatchError, TaktlineError, restore, text_of
from taktline.runtime.schedule import Schedule
from taktline.stage.names import named_buffers, named_parameters
from taktline.stage.ties import declared
from taktline.transport import Transport, transport_of
from taktline.transport.exchange import share_error, share_texts
from taktline.transport.one_rank import Alone

__all__ = ["Held", "Holding", "Together", "foremost", "priority_of", "state_of", "writers"]


@dataclass(frozen=True, slots=True)
class Together:
    """The processes that save and load together: those along each dimension of a mesh."""

    transports: Sequence[Transport] = (Alone(),)

    @property
    def sizes(self) -> list[int]:
        """How many processes there are along each dimension."""
        return [transport.size for transport in self.transports]

    @property
    def count(self) -> int:
        """How many processes there are."""
        return prod(self.sizes)

    @property
    def place(self) -> int:
        """The number of this process among all of them."""
        place, size = 0, 1
        for transport in self.transports:
            place, size = place + transport.rank * size, size * transport.size
        return place

    def gather(self, value: Any, call: str) -> list[Any]:
        """The JSON values of all processes, in the order of their places."""
        values, apart = [value], None
        for transport in self.transports:
            try:
                texts = share_texts(transport, json.dumps(None if apart else values), call)
                told = [read(text, Either([object], None), what=call) for text in texts]
                if None in told:
                    apart = share_error(transport, apart)
                else:
                    values = [each for row in told for each in row]
            except MismatchError as error:
                apart = apart or error  # those along the other dimensions have to know
        if apart is not None:
            raise apart
        return values

    def attempt(self, do: Callable[[], Any], what: str) -> tuple[Any, TaktlineError | None]:
        """The result, or what a disk or a user's code has raised, with the number of the rank."""
        who = f"rank {self.place}: " if self.count > 1 else ""
        try:
            return do(), None
        except TaktlineError as error:
            text = text_of(error)
            text = text if text.startswith("rank ") else f"{who}{text}"
            told, cause = restore(type(error), (text,), vars(error)), error.__cause__
        except Exception as error:
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            reason = getattr(error, "strerror", None) or text_of(error)
            told, cause = CheckpointError(f"{who}cannot {what}: {kind}{reason}"), error
        told.__cause__ = cause
        return None, told

    def everywhere(self, do: Callable[[], Any], what: str, call: str) -> list[Any]:
        """The results of all processes, as JSON; what one of them raises, all do."""
        result, error = self.attempt(do, what)
        told = self.gather([error is None, result], call)
        if not all(done for done, _ in told):
            for transport in self.transports:
                error = share_error(transport, error) or error
        if error is not None:
            raise error
        return [each for _, each in told]


def writers(told: Sequence[Sequence[tuple[str, int]]]) -> dict[str, int]:
    """Which process writes what several have: that with the highest priority, or the first.

    >>> writers([[("embed", 0), ("mean", 0)], [("embed", -1), ("mean", 1)]])
    {'embed': 0, 'mean': 1}
    """
    best: dict[str, tuple[int, int]] = {}
    for place, process in enumerate(told):
        for key, priority in process:
            best[key] = max(best.get(key, (priority, -place)), (priority, -place))
    return {key: -place for key, (_, place) in best.items()}


class Held(NamedTuple):
    """A parameter or a lasting buffer of this process."""

    name: str
    """In the model; of a tied weight, the one that stands for all."""
    tensor: torch.Tensor
    priority: int = 0
    """Of several under one name, the one with the highest is saved. All of them are loaded."""


@dataclass(slots=True)
class Holding:
    """What this process holds of a model."""

    held: Sequence[Held]
    modules: Sequence[nn.Module]
    aliases: Mapping[str, str]
    """Further names in the model of what has another one here or in another process."""
    names: Iterable[str]
    """All names in the model."""
    optional: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What belongs to the model's state and to no stage."""
    together: Together = field(default_factory=Together)
    schedule: Schedule | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of_model(cls, model: nn.Module) -> Holding:
        """All of a model, without a pipeline."""
        state = state_of(model)
        aliases = same(state)
        held = [Held(name, value) for name, value in state.items() if name not in aliases]
        device = next((value.device for value in state.values()), torch.device("cpu"))
        return cls(held, [model], aliases, list(state), device=device)

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> Holding:
        """The stages of a schedule on this rank; all processes of the job take part."""
        runner, stages = schedule._runner, schedule._stages
        world = transport_of(None, runner.device)
        # There may be other pipelines beside this one.
        wider = runner._random is None and world.size > runner.transport.size
        together = Together([world if wider else runner.transport])
        states = {stage.stage_index: state_of(stage.submod) for stage in stages}
        ties = {tie for stage in stages for tie in declared(stage.submod)}
        kinds = [
            (stage, [(name, isinstance(value, nn.Parameter)) for name, value in state.items()])
            for stage, state in states.items()
        ]
        told = together.gather(kinds, "the names of a checkpoint")
        by_stage = {stage: names for process in told for stage, names in process}
        tied = {use for tie in ties for use in tie.uses}
        uses = ((stage, *each) for stage, names in by_stage.items() for each in names)
        counts = Counter(name for stage, name, kind in uses if kind and (stage, name) not in tied)
        repeated = any(count > 1 for count in counts.values())

        def called(stage: int, name: str) -> str:
            return f"{stage}.{name}" if repeated else name

        here = [
            (s, called(s, n), value) for s, state in states.items() for n, value in state.items()
        ]
        aliases = joined(
            same({name: value for _, name, value in here}),
            tied_names([called(*use) for use in tie.uses] for tie in ties),
        )
        return cls(
            [Held(aliases.get(n, n), value, priority_of(value, s)) for s, n, value in here],
            [stage.submod for stage in stages],
            aliases,
            [called(stage, name) for stage, names in by_stage.items() for name, _ in names],
            together=together,
            schedule=schedule,
            device=runner.device,
        )

    def arrive(self, call: str) -> None:
        """Raise unless all ranks of all copies are in the same call; then put shards back.

        An evaluation may have left those of FSDP2 gathered.
        """
        if self.schedule is not None:
            self.schedule._runner.arrive(call)
        kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        for inner in (inner for module in self.modules for inner in module.modules()):
            if isinstance(inner, kind):
                inner.reshard()  # pyright: ignore[reportCallIssue]

    def parameter_names(self) -> dict[int, str]:
        """What the model calls a parameter, by its id."""
        return {id(held.tensor): held.name for held in self.held}


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and lasting buffers of a module, by their names in the user's model."""
    return {**named_parameters(module), **named_buffers(module, persistent=True)}


def foremost(held: Iterable[Held]) -> dict[str, Held]:
    """The one of each name that is saved."""
    best: dict[str, Held] = {}
    for each in held:
        if each.name not in best or best[each.name].priority < each.priority:
            best[each.name] = each
    return best


def priority_of(value: torch.Tensor, stage: int) -> int:
    """Which one of several tensors of a name is saved: that with the highest priority.

    The first stage stands for a tied weight. A buffer may be in several stages, too: the last one
    has come through the whole forward, which may change it.
    """
    return -stage if isinstance(value, nn.Parameter) else stage
