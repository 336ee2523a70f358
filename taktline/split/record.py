"""Records the forward of a model without data, and once more to find what does not repeat.

A number that a forward draws from ``random`` or numpy, or reads from a clock, would be a constant
of the record. Another run, with generators in another state, has another constant.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from taktline import pytree
from taktline.device import keep_generators
from taktline.errors import PartitionError
from taktline.split.arguments import (
    Absent,
    Call,
    Node,
    State,
    Value,
    device_of,
    filled,
    mapped,
    parts_in,
    walk,
)
from taktline.split.cut import Record, Step, StepKind
from taktline.split.recorder import Recorder, patched
from taktline.split.without_data import SAME_TYPES, Casts, EmptyModel, Fakes, joined

_lock = threading.RLock()
"""One forward is recorded at a time: functions of torch are replaced meanwhile."""
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, slice, Enum)
_OWN_OF_MODULES = frozenset(vars(nn.Module()))
_DEPTH = 4
"""How deep in the attributes of modules changes are found."""


def record_twice(
    empty: EmptyModel,
    call: Call,
    casts: Casts = SAME_TYPES,
    device: torch.device | None = None,
) -> Record:
    """The record of a call; raises if no two records are alike.

    One is enough if its steps are those of lines that two others have shown, for another kind.
    ``device`` is where it runs if no argument says so.
    """
    device = device or device_of(call)
    device = torch.device("cpu") if device.type == "meta" else device
    changed, found, alike = list[str](), None, 0
    last, before = None, _state_of(empty)
    for attempt in range(5):
        with _seeded(attempt) as is_drawn:
            made = _record(empty, call, device, casts)
            wanted = 3 if is_drawn() else 1  # a choice may be the same by chance
        after = _state_of(empty)
        changed = [name for name in after if before.get(name) != after[name]]
        found = None if last is None else _first_difference(last, made)
        lines = hash(tuple((step.kind, step.line) for step in made.steps))
        alike += 0 if last is None else 1
        if changed or found:
            alike = 0
        elif alike >= wanted or (last is None and wanted == 1 and lines in empty.seen):
            empty.seen.add(lines)
            return made
        if attempt > 1 and not alike:  # a first call may fill a cache of the model
            break
        last, before = made, after
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


_EDGES = (64, 316513203)
"""Words of the state of a generator that let it draw numbers near 0, and near 1."""


@contextmanager
def _seeded(attempt: int) -> Iterator[Callable[[], bool]]:
    """Let Python and numpy draw numbers near 0, near 1, near 0 again, and then random ones.

    Also tells whether any were drawn. Afterwards, the generators are as before.
    """
    numpy, before = sys.modules.get("numpy"), random.getstate()
    numpy_before = numpy.random.get_state() if numpy else None
    version, words, _ = random.Random(attempt).getstate()
    edge = [_EDGES[attempt % 2]] * (200 if attempt < 3 else 0)
    words = (*edge, *words[len(edge) : -1])
    random.setstate((version, (*words, 0), None))
    if numpy:
        numpy.random.set_state(("MT19937", words, 0))
    try:
        yield (
            lambda: (
                random.getstate()[1][-1] != 0
                or bool(numpy and numpy.random.get_state(legacy=True)[2] != 0)
            )
        )
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(numpy_before)


def _record(empty: EmptyModel, call: Call, device: torch.device, casts: Casts) -> Record:
    """Run the forward of a model once with these arguments."""
    fakes = Fakes(device, casts)
    with (
        _lock,
        keep_generators([device]),
        torch.compiler.set_stance("force_eager"),
        empty.filled(fakes.own),
    ):
        recorder = Recorder(empty, fakes, tuple(dict.fromkeys(("cpu", device.type))))
        made, held = recorder.record, _held_tensors(empty)
        args, kwargs = pytree.tree_map(
            lambda leaf: filled(mapped(leaf, fakes.fresh), {}),  # leaves may be objects
            call,
            is_leaf=lambda part: isinstance(part, Absent),
        )
        made.given = mapped(
            (args, kwargs), lambda tensor: recorder.value(tensor, "an argument of the model")
        )
        try:
            with patched(recorder, empty.model), recorder:
                output = empty.model(*args, **kwargs)
            recorder.require_same_draws()
            if recorder.refusal is not None:
                raise recorder.refusal
        except PartitionError:
            raise
        except Exception as error:
            if recorder.refusal is not None:
                raise recorder.refusal from error
            error.add_note(
                f"Taktline ran the forward of {empty.kind.__name__} without data, to record its "
                "steps"
            )
            raise
        finally:
            for generator, before in recorder.generators.values():
                generator.set_state(before)
        made.result = mapped(output, recorder.reference)
        _require_kept(empty, recorder, held)
    return made


def _outer(empty: EmptyModel) -> list[tuple[str, nn.Module, dict[str, Any]]]:
    """The modules that are in no unit, with their names and attributes."""
    inside = {id(part) for unit in empty.modules.values() for part in unit.modules()}
    return [
        (name, module, {k: v for k, v in vars(module).items() if k not in _OWN_OF_MODULES})
        for name, module in empty.model.named_modules()
        if id(module) not in inside
    ]


def _held_tensors(empty: EmptyModel) -> dict[str, torch.Tensor]:
    """The tensors in attributes of modules that are in no unit."""
    return {
        joined(name, ".".join(str(key) for _, key in at)): part
        for name, _, attributes in _outer(empty)
        for at, part in walk(attributes)
        if isinstance(part, torch.Tensor)
    }


def _require_kept(empty: EmptyModel, recorder: Recorder, held: dict[str, torch.Tensor]) -> None:
    """Raise if the forward has put another tensor into a buffer, or an attribute that it uses."""
    after = _held_tensors(empty)
    for name, tensor in held.items():
        if id(tensor) in recorder.constants and after.get(name) is not tensor:
            raise PartitionError(
                f"the forward of {empty.kind.__name__} uses its attribute {name!r}, and sets it "
                "for the next call, which stages cannot follow; keep it in a buffer, and change it "
                "in place, with copy_()"
            )
    buffers = [(joined(p, key), t) for p, m, _ in _outer(empty) for key, t in m._buffers.items()]
    for name, tensor in buffers:
        needed = {recorder.values.get(id(tensor))} - {None}
        differs = False
        for step in reversed(recorder.record.steps if needed else ()):
            if not needed.isdisjoint(step.makes):
                needed.update(step.reads)
                differs |= step.kind is StepKind.UNIT or step.draws or State(name) in step.states
        if differs or not needed.isdisjoint(parts_in(recorder.record.given, Value)):
            raise PartitionError(
                f"the forward of {empty.kind.__name__} sets its buffer {name!r} to a new tensor, "
                "which stages cannot follow; change it in place, with copy_()"
            )


def _state_of(empty: EmptyModel) -> dict[str, str]:
    """The attributes of the modules that are in no unit, as far as they compare."""
    return {
        joined(name, key): repr(
            [
                (at, part if isinstance(part, _CONSTANTS) else type(part))
                for at, part in walk(value)
                if len(at) < _DEPTH
            ]
        )
        for name, _, attributes in _outer(empty)
        for key, value in attributes.items()
    }


def _first_difference(one: Record, other: Record) -> str | None:
    """The line of the first step in which two records differ; None if they are alike."""
    for first, second in zip_longest(one.steps, other.steps):
        if not (first and second and _summary(first) == _summary(second)):
            return (second or first).line
    alike = _comparable(one.result) == _comparable(other.result)
    return None if alike else "the output of the forward"


def _summary(step: Step) -> tuple[Any, ...]:
    """All of a step that must repeat."""
    name = getattr(step.target, "__qualname__", None) or str(
        step.target if step.kind is StepKind.UNIT else type(step.target)
    )
    read = step.output if step.kind is StepKind.READ and step.is_known else None
    modes = (step.kind, step.modes, step.region, step.draws, len(step.writes))
    return (name, modes, _comparable((step.args, step.kwargs, read)))


def _comparable(template: Any) -> Any:
    """The constants in a template, and values in their places."""
    if isinstance(template, (Value, State)):
        return template
    if isinstance(template, torch.Tensor):
        return (template.shape, repr(template.to_dense().tolist()))
    if isinstance(template, _CONSTANTS):
        return repr(template)
    if isinstance(template, Node):
        return (template.kind, repr(template.keys), _comparable(template.parts))
    if isinstance(template, dict):
        return (list(template), _comparable(list(template.values())))
    if isinstance(template, (list, tuple)):
        return [_comparable(part) for part in template]
    return type(template)
