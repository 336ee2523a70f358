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
from taktline.split.named.guards import Guards
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


class SeenCall(NamedTuple):
    """A call of an own unit in the first run."""

    module: nn.Module
    args: Args
    kwargs: Kwargs
    before: Mapping[int, int]
    """The versions of the arguments before the call."""
    output: Any
    after: Mapping[int, int]
    """The versions of the arguments and the output after the call."""


def versions_of(values: Iterable[Any]) -> dict[int, int]:
    """The versions of tensors by id: they grow with each change in place."""
    return {id(value): version_of(value) for value in values if isinstance(value, torch.Tensor)}


def record_direct_calls(
    seen: Sequence[SeenCall],
    received: Sequence[Any],
    versions: Mapping[int, int],
    returned: Sequence[Any],
    guards: Guards,
    containers: Sequence[nn.Module],
) -> DirectCalls | None:
    """The calls that a first run has seen; None if a unit got a value from elsewhere.

    ``versions`` are those of the received values before the run.
    """
    places = {
        id(module): (container._modules, name)
        for container in containers
        for name, module in container._modules.items()
    }
    constants = [
        value
        for call in seen
        for value in (*call.args, *call.kwargs.values())
        if is_constant(value)
    ]
    first = len(received) + len(constants)
    constant_numbers = iter(range(len(received), first))
    numbers = {id(value): number for number, value in enumerate(received)}
    now = dict(versions)

    def number(value: Any) -> int:
        return next(constant_numbers) if is_constant(value) else numbers[id(value)]

    calls: list[_DirectCall] = []
    try:
        for place, call in enumerate(seen, first):
            if not isinstance(call.output, torch.Tensor):
                return None  # a number would be taken for a constant
            if any(now.get(key) != version for key, version in call.before.items()):
                return None  # the forward has changed a tensor in place
            args = tuple(map(number, call.args))
            kwargs = tuple((key, number(value)) for key, value in call.kwargs.items())
            calls.append(_DirectCall(*places[id(call.module)], *call_of(call.module), args, kwargs))
            numbers[id(call.output)] = place
            now.update(call.after)
        if any(now.get(key) != version for key, version in versions_of(returned).items()):
            return None
        last = tuple(numbers[id(value)] for value in returned)
    except KeyError:
        return None
    return DirectCalls(tuple(_freeing(calls, last)), tuple(constants), last, guards)


def _freeing(calls: Sequence[_DirectCall], returned: Iterable[int]) -> list[_DirectCall]:
    """The calls, each with the values that no later call needs."""
    needed = set(returned)
    freeing: list[_DirectCall] = []
    for call in reversed(calls):
        used = {*call.args, *(number for _, number in call.kwargs)}
        freeing.append(call._replace(done=tuple(used - needed)))
        needed |= used
    return freeing[::-1]
