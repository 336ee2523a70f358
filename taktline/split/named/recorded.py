"""What a call of a submodule leaves behind beside its output, which counts as part of that.

A layer may keep a tensor in an attribute, such as a loss of its own, or put it into a list or dict
that it is given. Models of transformers collect the logits of routers and the like by hooks on what
is inside of their layers, which put them into lists of the model that is running. Where the output
of a submodule of another stage is known, all this is put where the forward looks for it.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import getclosurevars, isfunction, unwrap
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.named.mutable import is_mutable, look_at
from taktline.split.named.of_transformers import lists
from taktline.split.named.placeholder import Placeholder

__all__ = [
    "Before",
    "Recorded",
    "recorded",
    "refill",
    "replayed",
    "since",
]

_TABLES = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, deque)


class Recorded(NamedTuple):
    """The output of a submodule, and what else its call has left behind."""

    output: Any
    collected: dict[str, list[Any]]
    """What was collected from inside of it."""
    attributes: dict[str, Any] = {}  # noqa: RUF012 - a value, which nobody changes
    """Tensors that it has kept in attributes of its own, by their names."""
    arguments: tuple[Any, ...] = ()
    """Its arguments, if it has changed lists or dicts among them."""


def since(lengths: Mapping[str, int]) -> dict[str, list[Any]]:
    """What was collected since lists had these lengths."""
    return {key: part[lengths[key] :] for key, part in lists().items() if key in lengths}


def recorded(call: Callable[[], Any]) -> Any:
    """What a call returns, with what is collected from it; the lists themselves get nothing."""
    into = lists()
    if not into:
        return call()
    lengths = {key: len(part) for key, part in into.items()}
    try:
        output = call()
        return Recorded(output, since(lengths))
    finally:
        for key, part in into.items():
            del part[lengths[key] :]


def replayed(output: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The output itself, with all that belongs to it where a call of the module leaves it."""
    if type(output) is not Recorded:
        return output
    for key, part in lists().items():
        part += output.collected.get(key, ())
    for name, value in output.attributes.items():
        path, _, key = name.rpartition(".")
        vars(module.get_submodule(path))[key] = value
    if output.arguments:
        refill((args, kwargs), output.arguments)
    return output.output


class Before:
    """A submodule and its arguments before a call, to see what else than an output it leaves."""

    def __init__(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._name = name
        self._module = module
        self._looks = {name: look_at(value) for name, value in _attributes(module)}
        self._arguments = (args, kwargs)
        self._leaves = pytree.tree_flatten(self._arguments)
        self._others = [(what, value, look_at(value)) for what, value in self._find_others()]

    def _find_others(self) -> list[tuple[str, Any]]:
        """What a call may change that cannot be made the same in other stages."""
        given = [
            (f"a {type(leaf).__name__} that it is given", leaf)
            for leaf in self._leaves[0]
            if is_mutable(leaf)
        ]
        return given + [(f"the global {name!r}", value) for name, value in _globals(self._module)]

    def left(self, output: Any) -> Any:
        """The output, with all that the call has left behind beside it."""
        for what, value, look in self._others:
            # A table that depends on no data may be kept anywhere.
            is_table = isinstance(value, _CONTAINERS) and not _has(Placeholder, value)
            if look_at(value) != look and not is_table:
                raise PartitionError(
                    f"{self._name!r} changes {what}, which other stages would not know of; let it "
                    "return what it adds, or put it into a list or dict that it is given"
                )
        attributes = {
            name: value
            for name, value in _attributes(self._module)
            if self._looks.get(name) != look_at(value) and _has(torch.Tensor, value)
        }
        leaves, spec = pytree.tree_flatten(self._arguments)
        before = self._leaves[0]
        is_same = spec == self._leaves[1] and all(map(operator.is_, leaves, before))
        if is_same and not attributes:
            return output
        whole = output if type(output) is Recorded else Recorded(output, {})
        return whole._replace(attributes=attributes, arguments=() if is_same else self._arguments)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module and all that is in it keep beside parameters, buffers and numbers."""
    for path, part in nn.Module.named_modules(module):
        for key, value in vars(part).items():
            if key not in _TABLES and (
                isinstance(value, (torch.Tensor, tuple)) or is_mutable(value)
            ):
                yield f"{path}.{key}" if path else key, value


def _globals(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The lists, dicts and the like that forwards use, and are not the modules' own."""
    for kind in {type(part) for _, part in nn.Module.named_modules(module)}:
        yield from _globals_of(kind)


@cache
def _globals_of(kind: type[nn.Module]) -> list[tuple[str, Any]]:
    forward: Any = unwrap(kind.forward)
    if not isfunction(forward):
        return []
    known = getclosurevars(forward)
    found = {**known.globals, **known.nonlocals}
    return [(name, value) for name, value in found.items() if isinstance(value, _CONTAINERS)]


def _has(kind: type[torch.Tensor], value: Any) -> bool:
    return any(isinstance(leaf, kind) for leaf in pytree.tree_leaves(value))


def refill(old: Any, new: Any) -> Any:
    """Let the lists and dicts of a tree have in them what those of another one have."""
    if type(old) is not type(new):
        return new
    if type(old) in (list, deque):
        parts = [refill(*pair) for pair in zip(old, new, strict=False)]
        parts += list(new)[len(old) :]
        old.clear()
        old.extend(parts)
    elif type(old) in (dict, OrderedDict, defaultdict):
        parts = {key: refill(old.get(key), part) for key, part in new.items()}
        old.clear()
        old.update(parts)
    elif type(old) is tuple:
        return tuple(refill(*pair) for pair in zip(old, new, strict=True))
    else:
        return new
    return old
