"""Records a forward twice, to find what does not repeat: counters, clocks, numbers drawn by hand.

A number that a forward draws from ``random`` or numpy, or reads from a clock, would be a constant
of the record. Another run, with generators in another state, has another constant.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from taktline.errors import PartitionError
from taktline.split.arguments import Call
from taktline.split.empty_model import EmptyModel, joined
from taktline.split.nested import Node, walk
from taktline.split.record import outer_modules, record
from taktline.split.recorder import OWN_OF_MODULES
from taktline.split.steps import Kind, Record, Step
from taktline.split.without_data import Casts

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
_DEPTH = 4
"""How deep in the attributes of modules changes are found."""


def record_twice(empty: EmptyModel, call: Call, casts: Casts | None = None) -> Record:
    """The record of a call; raises if no two records are alike."""
    last, state, changed, found = None, {}, "", None
    for attempt in range(3):  # a first call may fill a cache of the model
        with _seeded(attempt):
            made = record(empty, call, casts)
        before, state = state, _state_of(empty)
        if last is not None:
            changed, found = _changed(before, state), _first_difference(last, made)
            if not changed and found is None:
                return made
        last = made
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
def _seeded(seed: int) -> Iterator[None]:
    """Let the generators of Python and numpy begin with a seed, and afterwards be as before."""
    numpy = sys.modules.get("numpy")
    state = random.getstate(), numpy.random.get_state() if numpy else None
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state[0])
        if numpy:
            numpy.random.set_state(state[1])


def _state_of(empty: EmptyModel) -> dict[str, Any]:
    """The attributes of the modules that are in no unit, as far as they compare."""
    return {
        joined(path, key): [
            (at, part if isinstance(part, _CONSTANTS) else type(part))
            for at, part in walk(value)
            if len(at) < _DEPTH
        ]
        for path, module in outer_modules(empty)
        for key, value in vars(module).items()
        if key not in OWN_OF_MODULES
    }


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The name of an attribute that has changed."""
    names = (name for name in after if repr(before.get(name)) != repr(after[name]))
    return next(names, "")


def _first_difference(one: Record, other: Record) -> str | None:
    """The line of the first step in which two records differ; None if they are alike."""
    for first, second in zip(one.steps, other.steps, strict=False):
        if not _same(_summary(first), _summary(second)):
            return second.line
    if len(one.steps) != len(other.steps):
        return max(one.steps, other.steps, key=len)[min(len(one.steps), len(other.steps))].line
    return None if _same(one.result, other.result) else "the output of the forward"


def _summary(step: Step) -> tuple[Any, ...]:
    """All of a step that must repeat."""
    target = step.target
    name = target if step.kind is Kind.UNIT else getattr(target, "__qualname__", str(type(target)))
    read = step.output if step.kind is Kind.READ and step.is_known else None
    modes = (step.kind, step.modes, step.region, step.draws, len(step.writes))
    return (name, *modes, step.args, step.kwargs, read)


def _same(one: Any, other: Any) -> bool:
    """Whether two templates have equal constants, and values in the same places."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, Node) and one.spec != other.spec:
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, _CONSTANTS):
        return repr(one) == repr(other)
    return True
