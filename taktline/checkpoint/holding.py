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
from taktline.runtime.together import RankRandom
from taktline.stage.names import named_buffers, named_parameters
from taktline.stage.ties import declared
from taktline.transport import Transport, transport_of
from taktline.transport.control import share_error, share_texts
from taktline.transport.one_rank import Alone

__all__ = ["Held", "Holding", "Together"]


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

    def gather(self, value: Any, what: str) -> list[Any]:
        """The JSON values of all processes, in the order of their places."""
        values, apart = [value], None
        for transport in self.transports:
            try:
                texts = share_texts(transport, json.dumps(None if apart else values), what)
                told = [read(text, Either([object], None), what=what) for text in texts]
                if None in told:
                    apart = share_error(transport, apart)
                else:
                    values = [each for row in told for each in row]
            except MismatchError as error:
                apart = apart or error  # those along the other dimensions have to know
        if apart is not None:
            raise apart
        return values

    def attempt(self, do: Callable[[], object], what: str) -> TaktlineError | None:
        """Do something; what a disk or a user's code raises, as an error that names the rank."""
        who = f"rank {self.place}: " if self.count > 1 else ""
        try:
            do()
        except TaktlineError as error:
            text = text_of(error)
            text = text if text.startswith("rank ") else f"{who}{text}"
            told = restore(type(error), (text,), vars(error))
            told.__cause__ = error.__cause__
        except Exception as error:
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            reason = getattr(error, "strerror", None) or text_of(error)
            told = CheckpointError(f"{who}cannot {what}: {kind}{reason}")
            told.__cause__ = error
        else:
            return None
        return told

    def agree(self, error: TaktlineError | None) -> None:
        """Raise the error of the first process that has one, in all of them."""
        shared = error
        for transport in self.transports:
            shared = share_error(transport, shared) or shared
        if shared is not None:
            raise shared


class Held(NamedTuple):
    """A parameter or a lasting buffer of this process."""

    name: str
    """In the model; of a tied weight, the one that stands for all."""
    tensor: torch.Tensor
    counts: int = 0
    """Of several under one name, the one that counts most is saved. All of them are loaded."""


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
    random: RankRandom | None = None
    """The random numbers of ranks that share this process."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    arrive: Callable[[str], None] = lambda what: None
    """Raises unless all ranks of all copies are in the same call."""
    get_step: Callable[[], int] = lambda: 0
    set_step: Callable[[int], object] = lambda step: None

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
        runner = schedule._runner
        world = transport_of(None, runner.device)
        # There may be other pipelines beside this one.
        wider = runner._random is None and world.size > runner.transport.size
        together = Together([world if wider else runner.transport])
        states = {stage.stage_index: state_of(stage.submod) for stage in schedule._stages}
        ties = {tie for stage in schedule._stages for tie in declared(stage.submod)}
        kinds = [
            (stage, [(name, isinstance(value, nn.Parameter)) for name, value in state.items()])
            for stage, state in states.items()
        ]
        told = together.gather(kinds, "the names of a checkpoint")
        by_stage = {stage: names for process in told for stage, names in process}
        tied = {use for tie in ties for use in tie.uses}
        counts = Counter(
            name
            for stage, names in by_stage.items()
            for name, is_parameter in names
            if is_parameter and (stage, name) not in tied
        )
        repeated = any(count > 1 for count in counts.values())

        def called(stage: int, name: str) -> str:
            return f"{stage}.{name}" if repeated else name

        aliases = joined(
            same({called(s, n): v for s, state in states.items() for n, v in state.items()}),
            tied_names([called(*use) for use in tie.uses] for tie in ties),
        )
        return cls(
            [
                Held(aliases.get(each, each), value, weight(value, stage))
                for stage, state in states.items()
                for each, value in ((called(stage, name), value) for name, value in state.items())
            ],
            [stage.submod for stage in schedule._stages],
            aliases,
            [called(stage, name) for stage, names in by_stage.items() for name, _ in names],
            together=together,
            random=runner._random,
            device=runner.device,
            arrive=runner.arrive,
            get_step=lambda: schedule.steps,
            set_step=lambda step: setattr(schedule, "steps", step),
        )

    def settle(self) -> None:
        """Let FSDP2 put its shards back, which an evaluation may have left gathered."""
        kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        for module in self.modules:
            for inner in module.modules():
                if isinstance(inner, kind):
                    inner.reshard()  # pyright: ignore[reportCallIssue]

    def parameter_names(self) -> dict[int, str]:
        """What the model calls a parameter, by its id."""
        return {id(held.tensor): held.name for held in self.held}


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and lasting buffers of a module, by their names in the user's model."""
    return {**named_parameters(module), **named_buffers(module, persistent=True)}


def weight(value: torch.Tensor, stage: int) -> int:
    """How much a tensor counts among others of its name.

    The first stage stands for a tied weight. A buffer may be in several stages, too: the last one
    has come through the whole forward, which may change it.
    """
    return -stage if isinstance(value, nn.Parameter) else stage
