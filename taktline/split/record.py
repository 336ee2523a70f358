"""Records a forward twice, and refuses what differs: the functions that are replaced meanwhile."""

from __future__ import annotations

import inspect
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from taktline import pytree
from taktline.errors import PartitionError, TorchVersionError
from taktline.private import missing, private
from taktline.side_values import SideValues, add_loss, side_values
from taktline.split.arguments import (
    Call,
    State,
    Value,
    device_of,
    filled,
    mapped,
    walk,
)
from taktline.split.cut import Record, Step, StepKind
from taktline.split.recorder import OWN_OF_MODULES, Recorder
from taktline.split.without_data import EmptyModel, Fakes, Types, has_data, joined, replaced

_lock = threading.RLock()
"""One forward is recorded at a time: functions of torch are replaced meanwhile."""
_CONSTANTS = (
    *(bool, int, float, str, type, type(None), torch.dtype, torch.device, slice, Enum),
    pytree.TreeSpec,
)


def record_twice(
    empty: EmptyModel,
    call: Call,
    types: Types | None = None,
    device: torch.device | None = None,
) -> Record:
    """The record of a call; raises if no two records are alike.

    One is enough if its steps are those of lines that two others have shown, for another kind.
    ``device`` is where it runs if no argument says so.
    """
    device = device or device_of(call)
    device = torch.device("cpu") if device.type == "meta" else device
    difference, alike, last, before = "", 0, None, _state_of(empty)
    empty.sizes.clear()
    for attempt in range(5):
        with _seeded(attempt) as has_drawn:
            try:
                made = _record(empty, call, device, Fakes(device, types, min(attempt, 1)))
            except Exception as error:
                if attempt or isinstance(error, PartitionError):
                    raise
                continue  # some units cannot run on zeros
            wanted = 3 if has_drawn() else 1  # a choice may be the same by chance
        after = _state_of(empty)
        lines = hash(tuple((step.kind, step.line) for step in made.steps))
        if last is not None:
            difference = _change(empty, before, after) or _difference(last, made)
            alike = 0 if difference else alike + 1
        is_known = before == after and wanted == 1 and lines in empty.seen
        if alike >= wanted or is_known:
            empty.seen.add(lines)
            return made
        if attempt > 1 and not alike:  # a first call may fill a cache of the model
            break
        last, before = made, after
    raise PartitionError(difference)


def _change(empty: EmptyModel, before: dict[str, Any], after: dict[str, Any]) -> str:
    """What has changed in the model; empty if nothing has."""
    changed = [name for name in after if before.get(name) != after[name]]
    return (
        f"the forward of {empty.kind.__name__} changes its attribute {changed[0]!r} in each "
        "call, which stages cannot follow; keep what changes in a buffer, and change it in "
        "place, or in a submodule that one stage runs"
        if changed
        else ""
    )


def _difference(one: Record, other: Record) -> str:
    """The first step in which two records differ; empty if they are alike."""
    line = ""
    for first, second in zip_longest(one.steps, other.steps):
        if not (first and second and _summary(first) == _summary(second)):
            line = (second or first).line
            break
    if not line and _comparable(one.result) != _comparable(other.result):
        line = "the output of the forward"
    return line and (
        f"{line} does something else in each call: it depends on a number that Python, numpy or a "
        "generator of its own has drawn, or on the time; draw numbers with torch, such as "
        "torch.rand(()), or move it into a submodule that one stage runs"
    )


def _summary(step: Step) -> tuple[Any, ...]:
    """All of a step that must repeat."""
    target = step.target if step.kind is StepKind.UNIT else type(step.target)
    name = getattr(step.target, "__qualname__", None) or str(target)
    modes = (step.kind, step.modes, step.region, step.draws, len(step.writes))
    found = step.found if step.is_guard else None
    return (name, modes, _comparable((step.args, step.kwargs, found)))


def _comparable(nested: Any) -> list[Any]:
    """The containers and constants in a nested value or a template, with the data of tensors."""
    return [(path, _comparable_leaf(part)) for path, part in walk(nested)]


def _comparable_leaf(part: Any) -> Any:
    if isinstance(part, torch.Tensor) and has_data([part]):
        return part.shape, repr(part.to_dense().tolist())
    if isinstance(part, (Value, State)):
        return part.number if isinstance(part, Value) else part.names
    return repr(part) if isinstance(part, _CONSTANTS) else type(part)


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


def _record(empty: EmptyModel, call: Call, device: torch.device, fakes: Fakes) -> Record:
    """Run the forward of a model once with these arguments."""
    devices = [device] if device.type == "cuda" else []
    with (
        _lock,
        torch.random.fork_rng(devices),
        torch.compiler.set_stance("force_eager"),
        empty.filled(fakes.own),
    ):
        recorder = Recorder(empty, fakes, tuple(dict.fromkeys(("cpu", device.type))))
        made, held = recorder.record, _held_tensors(empty)
        args, kwargs = filled(mapped(call, fakes.fresh), {})
        made.given = mapped(
            (args, kwargs), lambda tensor: recorder.value(tensor, "an argument of the model")
        )
        try:
            with _patched(recorder, empty.model), recorder:
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


# What the forward keeps in the model


def _outer(empty: EmptyModel) -> dict[str, Any]:
    """The attributes and buffers of modules that are in no unit, by their names."""
    inside = {id(part) for unit in empty.modules.values() for part in unit.modules()}
    return {
        joined(name, key): value
        for name, module in empty.model.named_modules()
        if id(module) not in inside
        for key, value in (*vars(module).items(), *module._buffers.items())
        if key not in OWN_OF_MODULES
    }


def _state_of(empty: EmptyModel) -> dict[str, Any]:
    """The same, to compare it."""
    return {name: _comparable(value) for name, value in _outer(empty).items()}


def _held_tensors(empty: EmptyModel) -> dict[str, torch.Tensor]:
    """The tensors among them."""
    return {
        joined(name, ".".join(str(key) for _, key in path)): part
        for name, value in _outer(empty).items()
        for path, part in walk(value)
        if isinstance(part, torch.Tensor)
    }


def _require_kept(empty: EmptyModel, recorder: Recorder, held: dict[str, torch.Tensor]) -> None:
    """Raise if the forward uses a tensor of the model, and keeps another one for the next call."""
    after = _held_tensors(empty)
    used = {name for s in recorder.record.steps for state in s.states for name in state.names}
    for name, tensor in held.items():
        is_used = name in used or id(tensor) in recorder.constants
        if is_used and after.get(name) is not tensor:
            raise PartitionError(
                f"the forward of {empty.kind.__name__} uses its attribute {name!r}, and sets it "
                "for the next call, which stages cannot follow; keep it in a buffer, and change it "
                "in place, with copy_()"
            )


# What is replaced while a forward is recorded

_GENERATOR = "_checkpoint_without_reentrant_generator"
_generator = private(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator", "a recorded forward"
)
recording = SimpleNamespace(recorder=None)
"""Knows the recorder that is at work."""


@contextmanager
def _patched(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Let calls of modules, functions of autograd, checkpoints and skips come to a recorder."""
    if reason := missing(_generator):
        raise TorchVersionError(reason)
    function, checkpoints = torch.autograd.Function, vars(torch_checkpoint)
    generator = next(n for n in (f"{_GENERATOR}_impl", _GENERATOR) if n in checkpoints)
    before_region = checkpoints[generator]
    before_apply = inspect.getattr_static(function, "apply")
    before_saving = saved_tensors_hooks.__enter__

    def calling(before: Any) -> Any:
        return lambda self, *args, **kwargs: recorder.module(self, before, args, kwargs)

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording and kind is torch_checkpoint.CheckpointFunction:
            run, preserves, *rest = args
            with recorder.region(bool(preserves)):
                return run(*rest)
        return recorder.function(before_apply.__get__(None, kind), args, kwargs)

    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not recorder.is_recording:
            yield from before_region(*args, **kwargs)
            return
        given = inspect.signature(before_region).bind(*args, **kwargs).arguments
        with recorder.region(bool(given.get("preserve_rng_state", True))):
            yield

    def saving(self: Any) -> None:
        if recorder.is_recording:
            recorder.refuse(
                "lets autograd save other tensors (saved_tensors_hooks, save_on_cpu), which its "
                "stages would not do; use it inside of a submodule"
            )
        before_saving(self)

    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    log = logging.getLogger("torch._subclasses.fake_tensor")  # of what cannot run without data
    with ExitStack() as stack:
        for kind in (kind for kind in kinds if "__call__" in vars(kind)):
            stack.enter_context(replaced(kind, __call__=calling(vars(kind)["__call__"])))
        stack.enter_context(replaced(saved_tensors_hooks, __enter__=saving))
        stack.enter_context(replaced(function, apply=classmethod(apply)))
        stack.enter_context(replaced(torch_checkpoint, **{generator: region}))
        stack.enter_context(replaced(log, disabled=True))
        stack.enter_context(_RecordedValues(recorder))
        stack.enter_context(replaced(recording, recorder=recorder))
        yield


class _RecordedValues(SideValues):
    """The side values of a forward that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(0, {})
        self._recorder = recorder

    def put(self, name: str, value: torch.Tensor) -> None:
        """Put a value, and record it."""
        self._run("put", name, value)

    def get(self, name: str) -> torch.Tensor:
        """A value that was put before, as the value of a step."""
        return self._run("get", name)

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss, and record it."""
        self._run("add", loss)

    def _run(self, method: str, *args: Any) -> Any:
        if self._recorder.is_recording:
            return self._recorder.function(call_side_values, (method, *args), {})
        found = getattr(super(), method)(*args)
        if method != "get":
            return found
        self._recorder.shared.add(id(found))
        return found.view_as(found)


def call_side_values(method: str, *args: Any) -> Any:
    """Put or get a skip, or add a loss, of the stage that runs."""
    # Not add() itself: collect_losses() may collect it.
    return add_loss(*args) if method == "add" else getattr(side_values(), method)(*args)
