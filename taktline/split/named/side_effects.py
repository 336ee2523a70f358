"""What a call of a submodule leaves behind besides its output.

A layer may keep a tensor in an attribute, such as an added loss, or put it into a list or dict
among its arguments. Hooks of Hugging Face models append router logits and the like to lists of the
running model. A stage that replaces the submodule with placeholders leaves the same behind.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from functools import cache
from inspect import getclosurevars, isfunction, unwrap
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.named.hugging_face import collected_lists
from taktline.split.named.mutable import fingerprint, is_mutable
from taktline.split.named.placeholder import Placeholder

_TABLES = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, deque)


class FullOutput(NamedTuple):
    """The output of a submodule, and all that its call has left behind besides."""

    output: Any
    collected: dict[str, list[Any]]
    """What hooks have appended to each list of the running model."""
    attributes: dict[str, Any]
    """Tensors that the submodule has put into its attributes, by their names."""
    arguments: tuple[Any, ...]
    """The arguments, if the call has changed lists or dicts among them."""


def apply_side_effects(output: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The output alone; puts the rest where a call of the module leaves it."""
    if type(output) is not FullOutput:
        return output
    for key, part in collected_lists().items():
        part += output.collected.get(key, ())
    for name, value in output.attributes.items():
        path, _, key = name.rpartition(".")
        vars(module.get_submodule(path))[key] = value
    if output.arguments:
        refill((args, kwargs), output.arguments)
    return output.output


class StateBefore:
    """The state before a call of a submodule, to find what the call leaves behind."""

    def __init__(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._name = name
        self._module = module
        self._attributes = {name: fingerprint(value) for name, value in _attributes(module)}
        self._arguments = (args, kwargs)
        self._leaves, self._spec = pytree.tree_flatten(self._arguments)
        others = [
            (f"its argument ({type(leaf).__name__})", leaf)
            for leaf in self._leaves
            if is_mutable(leaf)
        ]
        kinds = {type(part) for _, part in nn.Module.named_modules(module)}
        found = (pair for kind in kinds for pair in _globals_of(kind))
        others += [(f"the global {name!r}", value) for name, value in found]
        self._others = [(what, value, fingerprint(value)) for what, value in others]
        """What a call may change, and other stages cannot reproduce."""
        self._lists = [(key, part, len(part)) for key, part in collected_lists().items()]

    def with_effects(self, output: Any) -> Any:
        """The output, with all that the call has left behind."""
        for what, value, before in self._others:
            # A table of values that depend on no data may be kept anywhere.
            is_table = isinstance(value, _CONTAINERS) and not _has(Placeholder, value)
            if fingerprint(value) != before and not is_table:
                raise PartitionError(
                    f"{self._name!r} changes {what}, which other stages would not see; let it "
                    "return the change, or put it into an argument that is a list or dict"
                )
        attributes = {
            name: value
            for name, value in _attributes(self._module)
            if self._attributes.get(name) != fingerprint(value) and _has(torch.Tensor, value)
        }
        leaves, spec = pytree.tree_flatten(self._arguments)
        is_same = spec == self._spec and all(map(operator.is_, leaves, self._leaves))
        if is_same and not attributes and not self._lists:
            return output
        collected = {key: part[length:] for key, part, length in self._lists}
        return FullOutput(output, collected, attributes, () if is_same else self._arguments)

    def drop_collected(self) -> None:
        """Remove what hooks have appended to lists of the running model."""
        for _, part, length in self._lists:
            del part[length:]


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module and of its submodules that may be or contain tensors."""
    for path, part in nn.Module.named_modules(module):
        for key, value in vars(part).items():
            if key not in _TABLES and (isinstance(value, torch.Tensor) or is_mutable(value)):
                yield f"{path}.{key}" if path else key, value


@cache
def _globals_of(kind: type[nn.Module]) -> list[tuple[str, Any]]:
    """The global lists, dicts and the like that a forward uses."""
    forward: Any = unwrap(kind.forward)
    if not isfunction(forward):
        return []
    known = getclosurevars(forward)
    found = {**known.globals, **known.nonlocals}
    return [(name, value) for name, value in found.items() if isinstance(value, _CONTAINERS)]


def _has(kind: type[torch.Tensor], value: Any) -> bool:
    return any(isinstance(leaf, kind) for leaf in pytree.tree_leaves(value))


def refill(old: Any, new: Any) -> Any:
    """The old tree, whose lists and dicts get the contents of those in the new tree."""
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
