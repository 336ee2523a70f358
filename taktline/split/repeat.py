"""Records a forward twice, to find what does not repeat: counters, clocks, numbers drawn by hand.

A number that a forward draws from ``random`` or numpy, or reads from a clock, would be a constant
of the record. Another run, with generators in another state, has another constant.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import Call
from taktline.split.empty_model import EmptyModel, joined
from taktline.split.nested import Node, Object
from taktline.split.record import record
from taktline.split.recorder import Casts
from taktline.split.steps import Kind, Record, Step

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


def record_twice(empty: EmptyModel, call: Call, casts: Casts | None = None) -> Record:
    """The record of a call; raises if no two records are alike."""
    with _own_generators():
        last = record(empty, call, casts)
        state = _state_of(empty)
        for _ in range(2):  # a first call may fill a cache of the model
            _stir()
            again = record(empty, call, casts)
            changed = _difference(state, _state_of(empty))
            state = _state_of(empty)
            if not changed and _first_difference(last, again) is None:
                return again
            found, last = _first_difference(last, again), again
    if changed:
        raise PartitionError(
            f"the forward of {empty.kind.__name__} changes its attribute {changed!r} in each call, "
            "which stages cannot follow; keep what changes in a buffer, and change it in place, "
            "or in a submodule that one stage runs"
        )
    raise PartitionError(
        f"{found} does something else in each call: it depends on a number that Python, numpy or a "
        "generator of its own has drawn, or on the time; draw numbers with torch, such as "
        "torch.rand(()), or move it into a submodule that one stage runs"
    )


@contextmanager
def _own_generators() -> Iterator[None]:
    """Afterwards the generators of Python and numpy are as before."""
    numpy = sys.modules.get("numpy")
    state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state[0])
        if numpy:
            numpy.random.set_state(state[1])


def _stir() -> None:
    """Bring the generators of Python, numpy and torch into other states."""
    random.random()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.random()


def _state_of(empty: EmptyModel) -> dict[str, Any]:
    """The attributes of the modules that are in no unit, as far as they compare."""
    found: dict[str, Any] = {}
    inside = {id(part) for unit in empty.modules.values() for part in unit.modules()}
    for path, module in empty.model.named_modules():
        if id(module) not in inside:
            for key, value in vars(module).items():
                if key not in _TABLES:
                    found[joined(path, key)] = _summary(value, 3)
    return found


_TABLES = frozenset(vars(nn.Module()))


def _summary(value: Any, depth: int) -> Any:
    if isinstance(value, _CONSTANTS):
        return value
    if depth and isinstance(value, dict):
        return [(key, _summary(part, depth - 1)) for key, part in value.items()]
    if depth and isinstance(value, (list, tuple)):
        return [_summary(part, depth - 1) for part in value]
    if depth and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor)):
        return _summary(vars(value), depth - 1)
    return type(value).__name__


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The name of an attribute that has changed."""
    for name, value in after.items():
        if name not in before or repr(before[name]) != repr(value):
            return name
    return ""


def _first_difference(one: Record, other: Record) -> str | None:
    """The line of the first step in which two records differ; None if they are alike."""
    for first, second in zip(one.steps, other.steps, strict=False):
        if not _same_step(first, second):
            return second.line
    if len(one.steps) != len(other.steps):
        return max(one.steps, other.steps, key=len)[min(len(one.steps), len(other.steps))].line
    return None if _same(one.result, other.result) else "the output of the forward"


def _same_step(one: Step, other: Step) -> bool:
    return (
        one.kind is other.kind
        and one.modes == other.modes
        and one.region == other.region
        and one.draws == other.draws
        and len(one.writes) == len(other.writes)
        and (one.target == other.target or (one.kind is Kind.CALL and _names(one) == _names(other)))
        and _same((one.args, one.kwargs), (other.args, other.kwargs))
        and (one.kind is not Kind.READ or not one.is_known or _same(one.output, other.output))
    )


def _names(step: Step) -> str:
    return getattr(step.target, "__qualname__", repr(type(step.target)))


def _same(one: Any, other: Any) -> bool:
    """Whether two templates have equal constants, and values in the same places."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, Node):
        return one.spec == other.spec and _same(one.parts, other.parts)
    if isinstance(one, Object):
        return _same(one.attributes, other.attributes)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    if isinstance(one, _CONSTANTS):
        return one == other
    return True
