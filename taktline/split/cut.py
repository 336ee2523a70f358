"""Records a forward twice, refuses what differs, and decides which stage runs which step."""

from __future__ import annotations

import inspect
import logging
import random
import sys
import threading
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from taktline import pytree
from taktline.errors import PartitionError, TorchVersionError
from taktline.private import private
from taktline.side_values import SideValues, add_loss
from taktline.split.python_state import OWN_OF_MODULES
from taktline.split.recorder import Generators, Recorder
from taktline.split.steps import (
    Call,
    Cut,
    Record,
    State,
    Step,
    Value,
    device_of,
    filled,
    mapped,
    parts_in,
    walk,
)
from taktline.split.without_data import EmptyModel, Fakes, has_data, joined, replaced


def record_twice(
    empty: EmptyModel,
    call: Call,
    computes_in: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Record:
    """The record of a call; raises if no two records are alike.

    One is enough if its steps are those of lines that two others have shown, for another kind.
    ``device`` is where it runs if no argument says so; ``computes_in`` is the type of FSDP.
    """
    device = device or device_of(call)
    device = torch.device("cpu") if device.type == "meta" else device
    difference, alike, last, zeros, generators = "", 0, None, True, Generators()
    for attempt in range(5):
        with _seeded(attempt, device) as has_drawn, generators.in_record(attempt):
            fakes = Fakes(device, computes_in, attempt % 2 if zeros else 1, empty.counter)
            try:
                made, change = _record(empty, call, device, fakes, generators)
            except Exception as error:
                if attempt or isinstance(error, PartitionError):
                    raise
                zeros = False  # some units cannot run on them
                continue
            wanted = 3 if has_drawn() else 1  # a choice may be the same by chance
        lines = hash(tuple((step.kind, step.line) for step in made.steps))
        if last is not None:
            difference = change or _difference(last, made)
            alike = 0 if difference else alike + 1
        if alike >= wanted or (wanted == 1 and not change and lines in empty.seen):
            empty.seen.add(lines)
            return made
        if attempt > 1 and not alike:  # a first call may fill a cache of the model
            break
        last = made
    raise PartitionError(difference)


def _difference(one: Record, other: Record) -> str:
    """The first step in which two records differ; empty if they are alike."""
    line = ""
    for first, second in zip_longest(one.steps, other.steps):
        if first and second and _summary(first) == _summary(second):
            continue
        if first and second and first.kind == second.kind == "read" and first.line == second.line:
            return str(first.differs(second.found))
        if first and second and first.is_made_up:
            return (
                f"{first.target!r} ({first.line}) returns other numbers, or tensors of other "
                "sizes, with other data, on which the forward may depend; return a tensor of one "
                "size, and mark in it what does not count"
            )
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
    target = step.target if step.kind == "unit" else type(step.target)
    name = getattr(step.target, "__qualname__", None) or str(target)
    modes = (step.kind, step.modes, step.region, step.draws, len(step.writes))
    returned = [value.absent.shape for value in step.places], step.constants
    return (name, modes, returned, _comparable((step.args, step.kwargs, step.found)))


def _comparable(nested: Any) -> list[Any]:
    """The containers and constants in a nested value or a template, with the data of tensors."""
    return [(path, _comparable_leaf(part)) for path, part in walk(nested)]


_PLAIN = (bool, int, float, str, type, type(None), torch.dtype, torch.device, slice, Enum)


def _comparable_leaf(part: Any) -> Any:
    if isinstance(part, torch.Tensor) and has_data([part]):
        return part.shape, repr(part.to_dense().tolist())
    if isinstance(part, (Value, State)):
        return part.number if isinstance(part, Value) else part.names
    return repr(part) if isinstance(part, (*_PLAIN, pytree.TreeSpec)) else type(part)


_EDGES = (64, 316513203)
"""Words of the state of a generator that let it draw numbers near 0, and near 1."""


@contextmanager
def _seeded(attempt: int, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Let torch, Python and numpy draw numbers near 0, near 1, near 0 again, and then random ones.

    Also tells whether Python or numpy has drawn any. Afterwards, the generators are as before.
    """
    numpy, before = sys.modules.get("numpy"), random.getstate()
    numpy_before = numpy.random.get_state() if numpy else None
    version, words, _ = random.Random(attempt).getstate()
    edge = [_EDGES[attempt % 2]] * (200 if attempt < 3 else 0)
    words = (*edge, *words[len(edge) : -1])
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            torch.cuda.manual_seed(attempt)
        state = torch.default_generator.manual_seed(attempt).get_state()
        if len(state) == 5056:  # that of torch 2: a header, and the same words
            state[8:12].view(torch.int32).fill_(len(words))
            state[16:24].zero_()
            state[24 : 24 + 8 * len(words)].view(torch.int64).copy_(torch.tensor(words))
            torch.set_rng_state(state)
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


# One run of a forward, and what is replaced meanwhile

_lock = threading.RLock()  # functions of torch are replaced meanwhile
_GENERATOR = "_checkpoint_without_reentrant_generator"
_generator = private(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator", "", otherwise=None
)
recording = SimpleNamespace(recorder=None)  # the one at work


def _record(
    empty: EmptyModel, call: Call, device: torch.device, fakes: Fakes, generators: Generators
) -> tuple[Record, str]:
    """Run the forward of a model once; also tells what it has changed in the model."""
    with _lock, torch.compiler.set_stance("force_eager"), empty.filled(fakes.own):
        recorder = Recorder(empty, fakes, tuple(dict.fromkeys(("cpu", device.type))), generators)
        made, before = recorder.record, _kept(empty)
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
        made.result = mapped(output, recorder.reference)
        return made, _changes(empty, recorder, before)


def _kept(empty: EmptyModel) -> dict[str, Any]:
    """What modules that are in no unit have in attributes and buffers, by name."""
    inside = {id(part) for unit in empty.modules.values() for part in unit.modules()}
    return {
        joined(name, ".".join(str(key) for _, key in path)): part
        for name, module in empty.model.named_modules()
        if id(module) not in inside
        for each, value in (*vars(module).items(), *module._buffers.items())
        if each not in OWN_OF_MODULES
        for path, part in walk(value, ((True, each),))
    }


def _changes(empty: EmptyModel, recorder: Recorder, before: dict[str, Any]) -> str:
    """What the forward has changed in the model; raises if it has used a tensor and replaced it."""
    after, changed = _kept(empty), ""
    used = {name for s in recorder.record.steps for state in s.states for name in state.names}
    for name, part in before.items():
        if isinstance(part, torch.Tensor):
            is_used = name in used or id(part) in recorder.constants
            if is_used and after.get(name) is not part:
                raise PartitionError(
                    f"the forward of {empty.kind.__name__} uses its attribute {name!r}, and sets "
                    "it for the next call, which stages cannot follow; keep it in a buffer, and "
                    "change it in place, with copy_()"
                )
        elif name not in after or _comparable_leaf(part) != _comparable_leaf(after[name]):
            changed = changed or name
    changed = changed or next((name for name in after if name not in before), "")
    return changed and (
        f"the forward of {empty.kind.__name__} changes its attribute {changed!r} in each call, "
        "which stages cannot follow; keep what changes in a buffer, and change it in place, or in "
        "a submodule that one stage runs"
    )


@contextmanager
def _patched(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Let calls of modules, functions of autograd, checkpoints and skips come to a recorder."""
    if _generator is None:
        raise TorchVersionError(f"cutting a model needs a torch that has {_GENERATOR}")
    function, checkpoints = torch.autograd.Function, vars(torch_checkpoint)
    generator = next(n for n in (f"{_GENERATOR}_impl", _GENERATOR) if n in checkpoints)
    before_region = checkpoints[generator]
    before_apply = inspect.getattr_static(function, "apply")
    before_saving = saved_tensors_hooks.__enter__

    def calling(before: Any) -> Any:
        return lambda self, *args, **kwargs: recorder.module(self, before, args, kwargs)

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording and kind is torch_checkpoint.CheckpointFunction:
            run, _, *given = args
            with recorder.region():
                return run(*given)
        return recorder.function(before_apply.__get__(None, kind), args, kwargs)

    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not recorder.is_recording:
            yield from before_region(*args, **kwargs)
            return
        with recorder.region():
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
        """Put a value inside of a unit."""
        self._require_unit()
        super().put(name, value)

    def get(self, name: str) -> torch.Tensor:
        """A value that another unit has put."""
        self._require_unit()
        found = super().get(name)
        self._recorder.shared.add(id(found))
        return found.view_as(found)

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss, and record it."""
        if self._recorder.is_recording:
            self._recorder.function(add_loss, (loss,), {})
        else:
            super().add(loss)

    def _require_unit(self) -> None:
        if self._recorder.is_recording:
            self._recorder.refuse(
                "puts or gets a skip between submodules; use a variable, which goes from stage to "
                "stage by itself"
            )


@dataclass(eq=False)
class StagePlan:
    """What one stage does."""

    steps: list[Step]
    received: tuple[Value, ...]
    """The values that come from the stage before."""
    sent: tuple[Value, ...]
    """The values that go to the next stage."""
    arguments: frozenset[Value]
    """The arguments of the model that this stage or a later one gets."""
    copied: frozenset[Value]
    """The arguments and received values that the stage changes in place."""
    guards: list[Step]
    """The reads of arguments that must be as they were recorded, and what they need."""

    @property
    def units(self) -> dict[str, None]:
        """The units that the stage calls."""
        return {step.target: None for step in self.steps if step.kind == "unit"}


class StepPlacement:
    """Which stage runs each step, and what crosses.

    What depends on the arguments of the model alone is *free*: each stage that needs it computes it
    by itself. Everything else runs once, on the stage in which the forward has got to it::

        steps      mask = …   x = embed(…)   x = layers.0(x, mask)  ║  x = layers.1(x, mask)
                   free       stage 0        stage 0                ║  stage 1
        stage 1 computes mask again, and x crosses

    ``starts`` are the numbers of the steps with which stages begin, from the second on.
    """

    def __init__(self, record: Record, starts: Sequence[int]) -> None:
        self.record = record
        self.stages = len(starts) + 1
        self.at = {step: bisect(starts, place) for place, step in enumerate(record.steps)}
        self.given = set(parts_in(record.given, Value))
        self.homes: dict[Value, int] = dict.fromkeys(self.given, 0)
        for step, stage in self.at.items():
            for value in step.places:
                self.homes.setdefault(value, stage)
        self.writes = {memory: step for step in record.steps for memory in step.writes}
        self.changed = [state for state in record.states if state.memory in self.writes]
        self.free, self.bound = self._find_free()
        self._require_one_stage_for_changes()
        self._require_one_stage_for_gradients()

    def _find_free(self) -> tuple[set[Step], set[Value]]:
        """The steps that depend on the arguments alone, and the values that do not."""
        record, pinned = self.record, set[int]()
        while True:
            bound = {value for value in record.values if value.memory in pinned}
            free, made, before = set[Step](), set(self.given), len(pinned)
            for step in record.steps:
                if (
                    step.kind != "unit"
                    and not step.draws
                    and bound.isdisjoint((*step.reads, *step.places))
                    and not any(s.is_parameter or s in self.changed for s in step.states)
                ):
                    free.add(step)
                else:
                    bound.update(value for value in step.places if value not in made)
                    pinned |= step.writes
                made.update(step.places)
            if len(pinned) == before:
                return free, bound

    def _require_one_stage_for_changes(self) -> None:
        """Raise if a buffer or parameter is changed by one stage and used by another."""
        for state in self.changed:
            if len(stages := sorted(self._stages_with(state))) > 1:
                raise PartitionError(
                    f"{self.writes[state.memory].line} changes {state.name!r}, which stages "
                    f"{stages} use; cut the model so that one stage has all uses of it"
                )

    def _stages_with(self, state: State) -> set[int]:
        """The stages that use a parameter or buffer, or a view of it."""
        found = set[int]()
        for step, stage in self.at.items():
            unit = f"{step.target}." if step.kind == "unit" else "?"
            if any(each.memory == state.memory for each in (*step.reads, *step.states)) or any(
                name.startswith(unit) for name in state.names
            ):
                found.add(stage)
        return found

    def _require_one_stage_for_gradients(self) -> None:
        """Raise if the forward asks for gradients that go through several stages."""
        for step, stage in self.at.items():
            if step.target is not torch.autograd.grad:
                continue
            inputs = step.kwargs.get("inputs", step.args[1:2])
            homes = {self.homes[value] for value in parts_in(inputs, Value)}
            for state in parts_in(inputs, State):
                homes |= self._stages_with(state)
            if homes > {stage} or homes.isdisjoint({stage}):
                raise PartitionError(
                    f"{step.line} asks for gradients in stage {stage}, of what stage "
                    f"{min(homes - {stage})} has made or uses, which no stage can follow; cut the "
                    "model so that one stage has all between them"
                )

    def plans(self) -> list[StagePlan]:
        """What each stage does."""
        reads = [step for step in self.at if step in self.free]
        guards, needed = self._needed(reads, set(), lambda step: step.kind == "read")
        arguments = needed & self.given
        needed, received = set(parts_in(self.record.result, Value)), tuple[Value, ...]()
        found: list[StagePlan] = []
        for stage in reversed(range(self.stages)):
            sent = received if found else ()
            own = [s for s, at in self.at.items() if at == stage or (at < stage and s in self.free)]
            steps, needed = self._needed(own, needed, self._must_run)
            arguments |= (needed & self.given) - self.bound
            crossing = {v for v in needed & self.bound if self.homes[v] < stage}
            received = tuple(sorted(crossing, key=lambda value: value.number))
            given = self.given if stage == 0 else arguments
            copied = self._copied(steps, {*received, *given}, stage)
            found.append(StagePlan(steps, received, sent, frozenset(arguments), copied, guards))
            needed = crossing
        return found[::-1]

    def _must_run(self, step: Step) -> bool:
        """Whether a step runs even if nothing needs what it makes."""
        is_pure = step.kind == "call" and not step.draws and not step.writes and step.places
        return step not in self.free and not is_pure

    def _needed(
        self, steps: Sequence[Step], needed: set[Value], must_run: Callable[[Step], bool]
    ) -> tuple[list[Step], set[Value]]:
        """Those of some steps that run, if later ones need these values; and all values needed."""
        needed, own = set(needed), list[Step]()
        for step in reversed(steps):
            if (
                must_run(step)
                or not needed.isdisjoint(step.places)
                or any(value.memory in step.writes for value in needed)
            ):
                own.append(step)
                needed.update(step.reads)
        return own[::-1], needed

    def _copied(self, steps: Sequence[Step], given: set[Value], stage: int) -> frozenset[Value]:
        """The values that a stage must copy before it changes them in place."""
        writes = {place: step for step in steps for place in step.writes}
        copied: dict[int, Value] = {}
        for value in given:
            step = writes.get(value.memory)
            if step is not None and copied.setdefault(value.memory, value) is not value:
                raise PartitionError(
                    f"{step.line} changes a value in place in stage {stage}, which gets it from "
                    f"stage {stage - 1} together with a view of it ({value.name}); "
                    "change a copy (x.clone()), or cut the model elsewhere"
                )
        return frozenset(copied.values())


def starts_of(record: Record, cuts: Sequence[Cut], name: str) -> list[int]:
    """The steps that are the calls at which a model is cut; ``name`` is the model's in errors."""
    calls = {cut: place for place, cut in enumerate(record.costs)}
    for cut in cuts:
        if cut not in calls:
            raise PartitionError(
                f"the forward of {name} does not call {cut!r}, so no stage can begin there; name "
                "a submodule that it calls, as block(x), not block.forward(x)"
            )
    for cut, following in pairwise(cuts):
        if calls[following] < calls[cut]:
            raise PartitionError(
                f"the forward of {name} calls {following!r} before {cut!r}; list the cuts in the "
                "order of their calls"
            )
    places = {
        Cut(step.target, step.call): place
        for place, step in enumerate(record.steps)
        if step.kind == "unit"
    }
    return [places[cut] for cut in cuts]
