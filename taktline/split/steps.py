"""What a recorded forward consists of: nested values with tensors, its steps, and the record.

Beside the containers that pytree knows, an object with attributes counts as a container if there is
a tensor in it: a dataclass, a state that blocks hand on. A template describes a nested value, with
values in the places of its tensors; what is one object in it is so in what is made of it, too.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from inspect import signature
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

import taktline
from taktline import pytree
from taktline.errors import PartitionError

Part = TypeVar("Part")
Path = tuple[tuple[bool, Any], ...]
"""The place of a part: for each container around it the key, and whether that is an attribute."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Sent instead of an argument of the model whose data no later stage needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of the forward: an argument of the model, or what a step makes."""

    number: int
    name: str
    """How to call it in a message."""
    memory: int
    """That of its views, too."""
    absent: Absent


@dataclass(eq=False, slots=True)
class State:
    """A parameter or buffer of the model."""

    names: tuple[str, ...]
    """All that the model has for it, if it is tied."""
    memory: int
    is_parameter: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


pytree.register_own(
    Absent,
    lambda absent: ([], [absent.dtype, *absent.shape]),
    lambda _, context: Absent(tuple(context[1:]), context[0]),
)


@dataclass(eq=False, slots=True)
class Node:
    """In a template: a container of another kind than tuple, list and dict."""

    kind: type
    keys: Any
    """The names of an object's attributes, or the structure that pytree has found."""
    parts: list[Any]

    def filled(self, parts: list[Any]) -> Any:
        """Such a container with these parts."""
        if self.kind is slice:
            return slice(*parts)
        if not isinstance(self.keys, list):
            return pytree.tree_unflatten(parts, self.keys)
        new: Any = self.kind.__new__
        made = new(self.kind)
        for key, part in zip(self.keys, parts, strict=True):
            object.__setattr__(made, key, part)  # also of a frozen one
        return made


_LEAVES = (torch.Tensor, Absent)
_MADE_ANEW = (tuple, list, dict, slice, defaultdict, deque, OrderedDict)
"""What is made in each call, as objects are, since a unit may change it."""
_NO_OBJECTS = (
    *(type(None), bool, int, float, complex, str, bytes, type, dict, list, tuple, deque),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, Absent, Value, State),
    *(nn.Module, torch.Tensor, torch.Generator, Enum),
)
_NOT_OF_USERS = ("torch", "builtins", "functools", "enum", "pathlib")


def is_object(value: Any) -> bool:
    """Whether a value is an object of Python code with attributes."""
    kind = type(value)
    if isinstance(value, _NO_OBJECTS) or kind.__module__.split(".")[0] in _NOT_OF_USERS:
        return False
    return hasattr(value, "__dict__") or hasattr(kind, "__dataclass_fields__")


def children_of(value: Any) -> list[tuple[tuple[bool, Any], Any]] | None:
    """The parts of a container with their keys; None for a leaf."""
    if isinstance(value, (tuple, list, deque)):
        return [((False, at), part) for at, part in enumerate(value)]
    if isinstance(value, dict):
        return [((False, key), part) for key, part in value.items()]
    if type(value) is slice:
        names = ["start", "stop", "step"]
    elif is_object(value):
        fields = getattr(value, "__dataclass_fields__", ())  # there may be slots
        names = [*dict.fromkeys((*fields, *getattr(value, "__dict__", ())))]
    else:
        return None
    return [((True, name), getattr(value, name)) for name in names if hasattr(value, name)]


def walk(value: Any, path: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Any]]:
    """A nested value and all its parts with their paths; into each container once."""
    seen = set() if seen is None else seen
    yield path, value
    children = children_of(value)
    if children and id(value) not in seen:
        seen.add(id(value))
        for key, part in children:
            yield from walk(part, (*path, key), seen)


def all_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested value, also in objects."""
    return [part for _, part in walk(value) if isinstance(part, torch.Tensor)]


def at_path(value: Any, path: Path) -> Any:
    """The part of a nested value at a path."""
    for is_attribute, key in path:
        value = getattr(value, key) if is_attribute else value[key]
    return value


def mapped(value: Any, change: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
    """The template of a nested value, with its tensors replaced.

    Objects are made anew in each call, since a unit may change them. Other containers that pytree
    knows are left as they are if there are no tensors in them.
    """
    kind, children, made = type(value), children_of(value), {} if made is None else made
    if isinstance(value, torch.Tensor) and value.is_nested:
        raise _refused(kind, "cannot go from stage to stage; pass its values() and offsets()")
    if isinstance(value, _LEAVES):
        return change(value)
    if isinstance(value, Iterator):
        raise _refused(kind, "is used up by a call, and stages make theirs anew; pass a list")
    is_own = kind in _MADE_ANEW or is_object(value)
    if children is None or not (is_own or any(isinstance(p, _LEAVES) for _, p in walk(value))):
        return value
    if id(value) in made:
        if made[id(value)] is None:
            raise _refused(kind, "refers to itself, which stages cannot do; pass on what it has")
        return made[id(value)]
    made[id(value)] = None
    keys, parts = [key for (_, key), _ in children], [part for _, part in children]
    is_plain = kind in (tuple, list, dict)
    if not is_plain and (kind in pytree.SUPPORTED_NODES or isinstance(value, tuple)):
        parts, keys = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    elif not is_own:
        how = "register it with torch.utils._pytree.register_pytree_node"
        raise _refused(kind, f"is a container of its own kind with tensors in it; {how}")
    parts = [mapped(part, change, made) for part in parts]
    if kind is tuple or kind is list:
        made[id(value)] = kind(parts)
    elif kind is dict:
        made[id(value)] = dict(zip(value, parts, strict=True))
    else:
        made[id(value)] = Node(kind, keys, parts)
    return made[id(value)]


def _refused(kind: type, what: str) -> PartitionError:
    return PartitionError(f"{line_of_user()}: {kind.__name__} {what}")


def filled(template: Any, values: Mapping[Any, Any], made: dict[int, Any] | None = None) -> Any:
    """The nested value that a template describes."""
    kind = type(template)
    if kind is Value or kind is State:
        return values[template]
    if kind is not tuple and kind is not list and kind is not dict and kind is not Node:
        return template
    made = {} if made is None else made
    if id(template) in made:
        return made[id(template)]
    if kind is dict:
        result = {key: filled(part, values, made) for key, part in template.items()}
    else:
        parts = template.parts if kind is Node else template
        result = [filled(part, values, made) for part in parts]
        if kind is not list:
            result = tuple(result) if kind is tuple else template.filled(result)
    made[id(template)] = result
    return result


def parts_in(template: Any, kind: type[Part]) -> list[Part]:
    """The parts of some kind in a template."""
    if isinstance(template, kind):
        return [template]
    if type(template) is Node:
        template = template.parts
    if type(template) is dict:
        template = template.values()
    elif type(template) not in (tuple, list):
        return []
    return [found for part in template for found in parts_in(part, kind)]


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]


def arguments_of(example: Any) -> Call:
    """An example as positional and keyword arguments.

    >>> arguments_of(((1, 2), {"scale": 3})), arguments_of((1, 2)), arguments_of({"scale": 3})
    (((1, 2), {'scale': 3}), ((1, 2), {}), ((), {'scale': 3}))
    """
    match example:
        case (tuple() as args, dict() as kwargs):
            pass
        case tuple():
            args, kwargs = example, {}
        case Mapping():
            args, kwargs = (), dict(example)
        case torch.Tensor():
            args, kwargs = (example,), {}
        case _:
            raise PartitionError(
                "example must be a tuple of arguments, a dict of keyword arguments, or (args, "
                f"kwargs), not {type(example).__name__}"
            )
    if unnamed := [key for key in kwargs if not isinstance(key, str)]:
        raise PartitionError(
            f"example has the keyword {unnamed[0]!r}, which is not a name; pass names of arguments"
        )
    return args, kwargs


def arguments_of_forward(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of the arguments of a kind of model."""
    return tuple(signature(kind.forward).parameters)[1:]


def device_of(value: Any) -> torch.device:
    """The device of the first tensor in a nested value, or the CPU."""
    return next((tensor.device for tensor in all_tensors(value)), torch.device("cpu"))


_CONSTANTS = (bool, int, float, str, Enum, torch.dtype, torch.device)


def key_of(value: Any, tensors: list[Any]) -> Any:
    """All that a forward can see of an argument without its data; lists the tensors in it.

    This runs in each call: the usual kinds come first.
    """
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, _LEAVES):
        tensors.append(value)
        return (value.shape, value.dtype)
    if kind is tuple or kind is list:
        return (kind, *[key_of(part, tensors) for part in value])
    if kind is dict:
        return (kind, *[(key, key_of(part, tensors)) for key, part in value.items()])
    if value is None or isinstance(value, _CONSTANTS):
        return (kind, value)
    if (children := children_of(value)) is not None:
        return (kind, *[(key, key_of(part, tensors)) for key, part in children])
    try:
        hash(value)
    except TypeError as error:
        raise PartitionError(
            f"an argument of the model cannot be compared with that of other calls ({error}); "
            "pass tensors, numbers and texts, also in lists, dicts and dataclasses"
        ) from None
    return value  # compared by its own equality


def without_cache(names: Collection[str], kwargs: Kwargs) -> Kwargs:
    """Keywords with ``use_cache=False``, if the model takes that and the user has not set it.

    Most models cache by default, but no stage could return the cache of all layers.
    """
    if "use_cache" not in names or kwargs.get("use_cache") is not None:
        return kwargs
    return {**kwargs, "use_cache": False}


def without_padding(model: nn.Module, dummy: Any) -> Any:
    """An example without padding tokens, of which models warn."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if not isinstance(dummy, torch.Tensor) or not isinstance(padding, int):
        return dummy
    return dummy.where(dummy != padding, padding + 1)


_OURS = os.path.dirname(os.path.abspath(taktline.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_SKIPPED = (_OURS, _TORCH, contextlib.__file__, copy.__file__, "<")


def line_of_user() -> str:
    """The innermost line that is neither of torch nor of this package, as ``file:line``."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            here = os.path.join(os.getcwd(), "")
            return f"{name.removeprefix(here)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the forward"


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
    settings: tuple[Any, ...]

    @classmethod
    def now(cls, devices: tuple[str, ...]) -> Modes:
        """The modes of this thread, for some types of devices."""
        autocast = [
            (each, torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None)
            for each in devices
        ]
        settings = tuple([ask() for ask, _ in _SETTINGS])
        return cls(torch.is_grad_enabled(), tuple(autocast), settings)

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


@dataclass(eq=False, slots=True)
class Step:
    """One step of the forward."""

    kind: Literal["unit", "call", "read"]
    """Calls a submodule, or a function; or reads numbers, which must be those recorded."""
    target: Any
    """A function, or the name of a unit."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: Modes
    line: str
    """Where the user's code does this."""
    region: tuple[int, ...]
    """The numbers of the checkpoints around it, from the outermost on."""
    places: dict[Value, Path] = field(default_factory=dict)
    """Where the tensors are that it makes: in its output, or where else a unit has left them."""
    constants: list[tuple[Path, Any]] = field(default_factory=list)
    """The numbers, texts and None in the output of a unit."""
    found: Any = None
    """What a read has found."""
    is_guard: bool = False
    """Whether a read asks for data of arguments alone."""
    writes: frozenset[int] = frozenset()
    """The memory that it changes."""
    is_made_up: bool = False
    """Whether a unit has run on made-up data."""
    draws: bool = False
    """Whether it must run once alone: it draws random numbers, or has side effects."""
    call: int = 0
    """Of a unit: which call of it."""
    needs_backward: bool = True
    """Of a unit: whether anything that it computes with gets a gradient."""

    @property
    def reads(self) -> list[Value]:
        """The values that it needs."""
        return parts_in((self.args, self.kwargs), Value)

    @property
    def states(self) -> list[State]:
        """The parameters and buffers that it needs."""
        return parts_in((self.args, self.kwargs), State)

    def differs(self, found: Any) -> PartitionError:
        """The error for a read that has found something else."""
        return PartitionError(
            f"{self.line} reads {found!r}, where it has read {self.found!r} before: what the "
            "forward does depends on a random number, or on a buffer that changes, which stages "
            "cannot decide by themselves; turn that off (a layerdrop of 0), or move it into a "
            "submodule"
        )


@dataclass(eq=False)
class Record:
    """A forward that was recorded once."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the model, with values in the places of tensors."""
    steps: list[Step]
    result: Any
    modes: Modes
    """Those in which the forward was called."""
    states: list[State]
    values: list[Value] = field(default_factory=list)
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
