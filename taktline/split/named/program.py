"""What a stage of a plain model does, without the model's forward: its own submodules, in a row.

A program is written while the first call of a kind runs, if all that the submodules are given is
what came from the stage before, or what others of them have returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.split.example import Args, Kwargs
from taktline.split.named.mutable import is_constant
from taktline.split.named.plain import Guards
from taktline.split.named.replacement import call_of

__all__ = ["Program", "Seen", "versions_of", "written"]


class _Call(NamedTuple):
    """A call of a submodule; values are known by their number."""

    modules: Mapping[str, nn.Module | None]
    name: str
    kind: type
    """What the submodule was then: it may have been wrapped since."""
    call: Callable[..., Any]
    args: tuple[int, ...]
    kwargs: tuple[tuple[str, int], ...]
    done: tuple[int, ...] = ()
    """What nobody needs any more."""


class Program(NamedTuple):
    """All calls of a stage. Values are numbered: what came, constants, and what calls return."""

    calls: tuple[_Call, ...]
    constants: tuple[Any, ...]
    returned: tuple[int, ...]
    guards: Guards

    def run(self, came: Iterable[Any]) -> tuple[Any, ...]:
        """Run a stage with what came from the stage before."""
        values: list[Any] = [*came, *self.constants]
        for modules, name, kind, call, args, kwargs, done in self.calls:
            module: Any = modules[name]
            if type(module) is not kind:
                call = type(module).__call__
            if len(args) == 1 and not kwargs:  # as most often
                values.append(call(module, values[args[0]]))
            else:
                named = {key: values[number] for key, number in kwargs}
                values.append(call(module, *[values[number] for number in args], **named))
            for number in done:
                values[number] = None
        return tuple([values[number] for number in self.returned])


class Seen(NamedTuple):
    """A call of a submodule of this stage, as it was seen."""

    module: nn.Module
    args: Args
    kwargs: Kwargs
    before: Mapping[int, int]
    """The versions of its arguments."""
    output: Any
    after: Mapping[int, int]
    """The versions of its arguments and output."""


def versions_of(values: Iterable[Any]) -> dict[int, int]:
    """Numbers that grow when tensors among some values are changed in place, if they may be."""
    return {
        id(value): 0 if value.is_inference() else value._version
        for value in values
        if isinstance(value, torch.Tensor)
    }


def written(
    seen: Sequence[Seen],
    came: Sequence[Any],
    versions: Mapping[int, int],
    returned: Sequence[Any],
    guards: Guards,
    containers: Sequence[nn.Module],
) -> Program | None:
    """A program of what was seen; None if something else has gone into it.

    ``versions`` are those of what came, when it did.
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
    first = len(came) + len(constants)
    fixed = iter(range(len(came), first))
    numbers = {id(value): number for number, value in enumerate(came)}
    now = dict(versions)

    def number(value: Any) -> int:
        return next(fixed) if is_constant(value) else numbers[id(value)]

    calls: list[_Call] = []
    try:
        for place, call in enumerate(seen, first):
            if not isinstance(call.output, torch.Tensor):
                return None  # a number would be taken for a constant
            if any(now.get(key) != version for key, version in call.before.items()):
                return None  # changed in place, outside of submodules
            args = tuple(map(number, call.args))
            kwargs = tuple((key, number(value)) for key, value in call.kwargs.items())
            calls.append(_Call(*places[id(call.module)], *call_of(call.module), args, kwargs))
            numbers[id(call.output)] = place
            now.update(call.after)
        if any(now.get(key) != version for key, version in versions_of(returned).items()):
            return None
        last = tuple(numbers[id(value)] for value in returned)
    except KeyError:
        return None
    return Program(tuple(_freed(calls, last)), tuple(constants), last, guards)


def _freed(calls: Sequence[_Call], returned: Iterable[int]) -> list[_Call]:
    """Calls with what is not needed after them."""
    needed = set(returned)
    freed: list[_Call] = []
    for call in reversed(calls):
        used = {*call.args, *(number for _, number in call.kwargs)}
        freed.append(call._replace(done=tuple(used - needed)))
        needed |= used
    return freed[::-1]
