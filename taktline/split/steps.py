"""What a recorded forward consists of: values, and the steps that make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from taktline.split.nested import Path, State, Value, parts_in


class Cut(NamedTuple):
    """A call of a submodule with which a stage begins.

    >>> Cut.read("encoder.layer@3", ["encoder.layer"])
    'encoder.layer@3'
    """

    unit: str
    call: int = 0
    """Which call of the submodule, from 0 up."""

    @classmethod
    def read(cls, text: str, names: Container[str]) -> Cut:
        """Parse a cut; ``names`` are the submodules, whose names may contain an @."""
        unit, _, call = text.rpartition("@")
        if text in names or not (unit and call.isdecimal()):
            return cls(text)
        return cls(unit, int(call))

    def __str__(self) -> str:
        return f"{self.unit}@{self.call}" if self.call else self.unit

    def __repr__(self) -> str:
        return repr(str(self))


class StepKind(Enum):
    """What a step does."""

    UNIT = "unit"
    """Calls a submodule."""
    CALL = "call"
    """Calls a function."""
    READ = "read"
    """Reads numbers from tensors; they must be those that were recorded."""


_SETTINGS: list[tuple[Any, Any]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
]
"""What a forward may set for a part of it: how to ask, and how to set it."""


class Modes(NamedTuple):
    """The modes of torch in which a step runs."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype | None], ...]
    """For each type of device the type in which autocast computes; None if it is off."""
    settings: tuple[Any, ...] = ()

    @classmethod
    def now(cls, devices: tuple[str, ...]) -> Modes:
        """The modes of this thread that a call differs in, for some types of devices."""
        autocast = [
            (each, torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None)
            for each in devices
        ]
        return cls(torch.is_grad_enabled(), tuple(autocast))

    @classmethod
    def all_now(cls, devices: tuple[str, ...]) -> Modes:
        """All modes of this thread."""
        return cls.now(devices)._replace(settings=tuple([ask() for ask, _ in _SETTINGS]))

    @contextmanager
    def instead_of(self, outer: Modes) -> Iterator[None]:
        """Let these be the modes, where they differ from those outside."""
        with ExitStack() as stack:
            if self.grad != outer.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            pairs = zip(_SETTINGS, self.settings, outer.settings, strict=True)
            for (ask, change), setting, before in pairs:
                if setting != before:
                    stack.callback(change, ask())
                    change(setting)
            for (device, dtype), (_, before) in zip(self.autocast, outer.autocast, strict=True):
                if dtype != before:
                    stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
            yield


class CheckpointRegion(NamedTuple):
    """A checkpointed part of the forward."""

    number: int
    preserves_rng: bool


class Extra(NamedTuple):
    """A tensor that a unit leaves elsewhere than in its output."""

    value: Value
    path: Path
    """The place in the arguments, in the attributes of a module, or in the output of one."""
    module: str | None = None
    """The module inside of the unit; None for the arguments."""
    call: int | None = None
    """Of an output: which call of the module inside of the unit."""


@dataclass(eq=False, slots=True)
class Step:
    """One step of the forward."""

    kind: StepKind
    target: Any
    """A function, or the name of a unit."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    """With values in the places of tensors; of a read, what was read."""
    modes: Modes
    line: str
    """Where the user's code does this."""
    region: tuple[CheckpointRegion, ...] = ()
    """The checkpoints around it, from the outermost on."""
    writes: frozenset[int] = frozenset()
    """The memory that it changes."""
    draws: bool = False
    """Whether it must run once alone: it draws random numbers, or has side effects."""
    extras: list[Extra] = field(default_factory=list)
    call: int = 0
    """Of a unit: which call of it."""
    is_known: bool = True
    """Of a read: whether it reads data of arguments alone."""

    @property
    def reads(self) -> list[Value]:
        """The values that it needs."""
        return parts_in((self.args, self.kwargs), Value)

    @property
    def states(self) -> list[State]:
        """The parameters and buffers that it needs."""
        return parts_in((self.args, self.kwargs), State)

    @property
    def makes(self) -> list[Value]:
        """The values that it returns or leaves elsewhere."""
        if self.kind is StepKind.READ:
            return []
        return [*parts_in(self.output, Value), *(extra.value for extra in self.extras)]


@dataclass(eq=False)
class Record:
    """A forward that was recorded once."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the model, with values in the places of tensors."""
    steps: list[Step]
    result: Any
    modes: Modes
    """Those in which the forward was called."""
    memory: dict[Value, int]
    """The memory in which each value lies; views of a value lie in the same."""
    state_memory: dict[str, int]
    """The memory of parameters and buffers."""
    aliases: dict[str, tuple[str, ...]]
    """Of a tied parameter: all names that the model has for it."""
    is_parameter: Container[str]
    """The names of parameters."""
    names: dict[Value, str]
    """How to call a value in a message."""
    changes_buffers: set[str] = field(default_factory=set)
    """The units that change their buffers."""
    sized: set[Value] = field(default_factory=set)
    """The values whose sizes depend on data."""
    metas: dict[Value, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    """The shape and type of each value."""
    costs: dict[Cut, int] = field(default_factory=dict)
    """What each call of a unit costs, in the order of the calls."""
    runs: Counter[str] = field(default_factory=Counter)
    """How often each module has run, also inside of units."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """Calls of modules that are in no unit: the first step of each, and the one after it."""
    marks: list[int] = field(default_factory=list)
    """The steps before which the forward has called ``pipe_split()``."""
    marked_units: set[str] = field(default_factory=set)
    """The units that call ``pipe_split()`` inside."""

    def calls(self) -> Counter[str]:
        """How often each unit is called."""
        return Counter(cut.unit for cut in self.costs)
