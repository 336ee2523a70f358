"""The calls of a stage's own units, one after the other, without the model's forward.

The first call of a stage records them, if the forward is plain (see ``guards``), and each unit
gets nothing but values from the stage before and outputs of other units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.split.arguments import Args, Kwargs
from taktline.split.named.guards import Guards, guards_of
from taktline.split.named.layout import Layout
from taktline.split.named.mutable import is_constant, version_of
from taktline.split.named.units import call_of


class _DirectCall(NamedTuple):
    """A call of a unit; values are known by their number."""

    modules: Mapping[str, nn.Module | None]
    name: str
    kind: type
    """The class of the unit: it may have been wrapped since."""
    call: Callable[..., Any]
    args: tuple[int, ...]
    kwargs: tuple[tuple[str, int], ...]
    done: tuple[int, ...] = ()
    """The values that no later call needs."""


class DirectCalls(NamedTuple):
    """All calls of a stage. Values are numbered: received ones, constants, outputs of calls."""

    calls: tuple[_DirectCall, ...]
    constants: tuple[Any, ...]
    returned: tuple[int, ...]
    guards: Guards

    def run(self, received: Iterable[Any]) -> tuple[Any, ...]:
        """Run a stage on the values from the stage before."""
        values: list[Any] = [*received, *self.constants]
        for modules, name, kind, call, args, kwargs, done in self.calls:
            module: Any = modules[name]
            if type(module) is not kind:
                call = type(module).__call__
            if len(args) == 1 and not kwargs:  # the usual case, made quick
                values.append(call(module, values[args[0]]))
            else:
                named = {key: values[number] for key, number in kwargs}
                values.append(call(module, *[values[number] for number in args], **named))
            for number in done:
                values[number] = None
        return tuple([values[number] for number in self.returned])


def _versions_of(values: Iterable[Any]) -> dict[int, int]:
    """The versions of tensors by id: they grow with each change in place."""
    return {id(value): version_of(value) for value in values if isinstance(value, torch.Tensor)}


class _SeenCall(NamedTuple):
    unit: nn.Module
    args: Args
    kwargs: Kwargs
    output: Any


class CallRecorder:
    """Sees the calls of own units in a first run, to make direct calls of them."""

    def __init__(self, received: Sequence[Any]) -> None:
        self._received = received
        self._versions = _versions_of(received)
        """Those that values have got from units, or when they were received."""
        self._seen: list[_SeenCall] = []
        self._is_changed = False
        """Whether the forward itself has made or changed a value."""

    def note_before(self, values: Iterable[Any]) -> None:
        """Note what a unit is going to get, or the stage returns."""
        now = _versions_of(values).items()
        self._is_changed |= any(self._versions.get(key) != version for key, version in now)

    def note_after(self, unit: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Note a call of a unit."""
        self._seen.append(_SeenCall(unit, args, kwargs, output))
        self._versions |= _versions_of((*args, *kwargs.values(), output))

    def direct_calls(
        self, returned: Sequence[Any], layout: Layout, stage_module: nn.Module
    ) -> DirectCalls | None:
        """The calls; None if the forward is not plain, or a unit got a value from elsewhere."""
        self.note_before(returned)
        # A number in an output would be taken for a constant.
        has_numbers = not all(isinstance(call.output, torch.Tensor) for call in self._seen)
        if self._is_changed or has_numbers:
            return None
        guards = guards_of(layout, stage_module)
        if guards is None:
            return None
        places = {
            id(module): (container._modules, name)
            for container in layout.containers_in(stage_module).values()
            for name, module in container._modules.items()
        }
        given = [value for call in self._seen for value in (*call.args, *call.kwargs.values())]
        constants = tuple(filter(is_constant, given))
        known = [*self._received, *constants]
        constant_numbers = iter(range(len(self._received), len(known)))
        numbers = {id(value): number for number, value in enumerate(self._received)}

        def number(value: Any) -> int:
            return next(constant_numbers) if is_constant(value) else numbers[id(value)]

        calls: list[_DirectCall] = []
        try:
            for place, (unit, args, kwargs, output) in enumerate(self._seen, len(known)):
                positional = tuple(map(number, args))
                named = tuple((key, number(value)) for key, value in kwargs.items())
                calls.append(_DirectCall(*places[id(unit)], *call_of(unit), positional, named))
                numbers[id(output)] = place
            last = tuple(numbers[id(value)] for value in returned)
        except KeyError:
            return None
        return DirectCalls(tuple(_freeing(calls, last)), constants, last, guards)


def _freeing(calls: Sequence[_DirectCall], returned: Iterable[int]) -> list[_DirectCall]:
    """The calls, each with the values that no later call needs."""
    needed = set(returned)
    freeing: list[_DirectCall] = []
    for call in reversed(calls):
        used = {*call.args, *(number for _, number in call.kwargs)}
        freeing.append(call._replace(done=tuple(used - needed)))
        needed |= used
    return freeing[::-1]
