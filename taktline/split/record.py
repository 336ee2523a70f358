"""Records the forward of a model without data, and once more to find what does not repeat.

A number that a forward draws from ``random`` or numpy, or reads from a clock, would be a constant
of the record. Another run, with generators in another state, has another constant.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.device import keep_generators
from taktline.errors import PartitionError
from taktline.split.arguments import Call, device_of
from taktline.split.empty_model import EmptyModel, joined
from taktline.split.kinds import Absent
from taktline.split.nested import Node, mapped, parts_in, walk
from taktline.split.patches import patched
from taktline.split.recorder import OWN_OF_MODULES, Recorder
from taktline.split.steps import Kind, Record, State, Step, Value
from taktline.split.without_data import Casts, Fakes

_lock = threading.RLock()
"""One forward is recorded at a time: functions of torch are replaced meanwhile."""
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
_DEPTH = 4
"""How deep in the attributes of modules changes are found."""


def record_twice(
    empty: EmptyModel,
    call: Call,
    casts: Casts | None = None,
    device: torch.device | None = None,
) -> Record:
    """The record of a call; raises if no two records are alike.

    ``device`` is where it runs if no argument says so.
    """
    device = device or device_of(call)
    if device.type == "meta":
        device = torch.device("cpu")
    runs: list[tuple[Record, dict[str, str]]] = []
    changed: list[str] = []
    found = None
    for attempt in range(3):  # a first call may fill a cache of the model
        with _seeded(attempt):
            runs.append((_record(empty, call, device, casts), _state_of(empty)))
        if attempt:
            (last, before), (made, after) = runs[-2:]
            changed = [name for name in after if before.get(name) != after[name]]
            found = _first_difference(last, made)
            if not changed and found is None:
                return made
    if changed:
        raise PartitionError(
            f"the forward of {empty.kind.__name__} changes its attribute {changed[0]!r} in each "
            "call, which stages cannot follow; keep what changes in a buffer, and change it in "
            "place, or in a submodule that one stage runs"
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


def _record(
    empty: EmptyModel, call: Call, device: torch.device, casts: Casts | None = None
) -> Record:
    """Run the forward of a model once with these arguments."""
    fakes = Fakes(device, casts or {})
    with (
        _lock,
        keep_generators([device]),
        torch.compiler.set_stance("force_eager"),
        empty.filled(partial(fakes.fresh, device=device)),
    ):
        recorder = Recorder(empty, fakes, tuple(dict.fromkeys(("cpu", device.type))))
        made = recorder.record
        args, kwargs = pytree.tree_map(
            fakes.fresh, call, is_leaf=lambda part: isinstance(part, Absent)
        )
        made.given = mapped(
            (args, kwargs), lambda tensor: recorder.value(tensor, "an argument of the model")
        )
        try:
            with patched(recorder, empty.model), recorder:
                output = empty.model(*args, **kwargs)
        except PartitionError:
            raise
        except Exception as error:
            error.add_note(
                f"Taktline ran the forward of {empty.kind.__name__} without data, to record its "
                "steps"
            )
            raise
        finally:
            for generator, before in recorder.generators.values():
                generator.set_state(before)
        made.result = mapped(output, recorder.reference)
        _require_no_new_buffers(empty, recorder)
    return made


def _require_no_new_buffers(empty: EmptyModel, recorder: Recorder) -> None:
    """Raise if the forward itself has set a buffer to a tensor that differs in each call."""
    buffers = [(joined(p, key), t) for p, m in _outer(empty) for key, t in m._buffers.items()]
    for name, tensor in buffers:
        needed = {recorder.values.get(id(tensor))} - {None}
        differs = False
        for step in reversed(recorder.record.steps if needed else ()):
            if not needed.isdisjoint(step.makes):
                needed.update(step.reads)
                differs |= step.kind is Kind.UNIT or step.draws or State(name) in step.states
        if differs or not needed.isdisjoint(parts_in(recorder.record.given, Value)):
            raise PartitionError(
                f"the forward of {empty.kind.__name__} sets its buffer {name!r} to a new tensor, "
                "which stages cannot follow; change it in place, with copy_()"
            )


def _outer(empty: EmptyModel) -> list[tuple[str, nn.Module]]:
    """The modules that are in no unit, with their names."""
    inside = {id(part) for unit in empty.modules.values() for part in unit.modules()}
    return [(name, m) for name, m in empty.model.named_modules() if id(m) not in inside]


def _state_of(empty: EmptyModel) -> dict[str, str]:
    """The attributes of the modules that are in no unit, as far as they compare."""
    return {
        joined(path, key): repr(
            [
                (at, part if isinstance(part, _CONSTANTS) else type(part))
                for at, part in walk(value)
                if len(at) < _DEPTH
            ]
        )
        for path, module in _outer(empty)
        for key, value in vars(module).items()
        if key not in OWN_OF_MODULES
    }


def _first_difference(one: Record, other: Record) -> str | None:
    """The line of the first step in which two records differ; None if they are alike."""
    for first, second in zip_longest(one.steps, other.steps):
        if not (first and second and _same(_summary(first), _summary(second))):
            return (second or first).line
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
