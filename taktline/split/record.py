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
from taktline.split.nested import Absent, Node, State, Value, filled, mapped, parts_in, walk
from taktline.split.patches import patched
from taktline.split.recorder import OWN_OF_MODULES, Recorder
from taktline.split.steps import Record, Step, StepKind
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

    One is enough if its steps are those of lines that two others have shown, for another kind.
    ``device`` is where it runs if no argument says so.
    """
    device = device or device_of(call)
    if device.type == "meta":
        device = torch.device("cpu")
    untouched = _state_of(empty)
    runs: list[tuple[Record, dict[str, str]]] = []
    changed: list[str] = []
    found, wanted = None, 2
    for attempt in range(5):
        with _seeded(attempt) as is_drawn:
            runs.append((_record(empty, call, device, casts), _state_of(empty)))
            if is_drawn():  # a choice may be the same by chance
                wanted = 4
        made, after = runs[-1]
        lines = hash(tuple((step.kind, step.line) for step in made.steps))
        if not attempt and wanted == 2 and lines in empty.seen and after == untouched:
            return made
        if attempt:
            last, before = runs[-2]
            changed = [name for name in after if before.get(name) != after[name]]
            found = _first_difference(last, made)
            if changed or found is not None:
                if attempt > 1:
                    break
                wanted += 1  # a first call may fill a cache of the model
            if attempt + 1 == wanted:
                empty.seen.add(lines)
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


_SMALL, _LARGE = 64, 316513203
"""Words of the state of a generator that let it draw a number near 0, or near 1."""


@contextmanager
def _seeded(attempt: int) -> Iterator[Callable[[], bool]]:
    """Let Python and numpy draw numbers near 0, near 1, and then random ones in other attempts.

    Also tells whether any were drawn. Afterwards, the generators are as before.
    """
    numpy, before = sys.modules.get("numpy"), random.getstate()
    numpy_before = numpy.random.get_state() if numpy else None
    version, words, _ = random.Random(attempt).getstate()
    edge = (_SMALL, _LARGE)[attempt % 2 : attempt % 2 + 1] * (200 if attempt < 3 else 0)
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
        held = _held_tensors(empty)
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
        _require_no_new_buffers(empty, recorder)
        for name, tensor in held.items():
            if id(tensor) in recorder.constants and _held_tensors(empty).get(name) is not tensor:
                raise PartitionError(
                    f"the forward of {empty.kind.__name__} uses its attribute {name!r}, and sets "
                    "it for the next call, which stages cannot follow; keep it in a buffer, and "
                    "change it in place, with copy_()"
                )
    return made


def _held_tensors(empty: EmptyModel) -> dict[str, torch.Tensor]:
    """The tensors in attributes of modules that are in no unit."""
    return {
        joined(path, ".".join(str(key) for _, key in at)): part
        for path, module in _outer(empty)
        for at, part in walk({k: v for k, v in vars(module).items() if k not in OWN_OF_MODULES})
        if isinstance(part, torch.Tensor)
    }


def _require_no_new_buffers(empty: EmptyModel, recorder: Recorder) -> None:
    """Raise if the forward itself has set a buffer to a tensor that differs in each call."""
    buffers = [(joined(p, key), t) for p, m in _outer(empty) for key, t in m._buffers.items()]
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
    name = (
        target if step.kind is StepKind.UNIT else getattr(target, "__qualname__", str(type(target)))
    )
    read = step.output if step.kind is StepKind.READ and step.is_known else None
    modes = (step.kind, step.modes, step.region, step.draws, len(step.writes))
    return (name, *modes, step.args, step.kwargs, read)


def _same(one: Any, other: Any, seen: set[int] | None = None) -> bool:
    """Whether two templates have equal constants, and values in the same places."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, _CONSTANTS):
        return repr(one) == repr(other)
    if isinstance(one, slice):
        return _same((one.start, one.stop, one.step), (other.start, other.stop, other.step), seen)
    seen = set() if seen is None else seen
    if not isinstance(one, (dict, list, tuple, Node)) or id(one) in seen:
        return True
    seen.add(id(one))
    if isinstance(one, Node):
        return one.spec == other.spec and _same(one.parts, other.parts, seen)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key], seen) for key in one)
    return len(one) == len(other) and all(
        _same(*pair, seen) for pair in zip(one, other, strict=True)
    )
