"""One step of a schedule: on Taktline's runtime, with its own stages or by calls to torch's.

If neither a schedule nor its stages override a method, and no action has a custom function, its
order becomes a plan for Taktline's own stages. Otherwise each action makes the calls that torch
makes to stages (:mod:`~taktline.compat.torch_pipelining._calls`), as an instruction of the same
kind of program, with the same agreement before the step and the same outcome on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from inspect import isfunction
from typing import Any
from weakref import proxy

import torch

from taktline.compat.torch_pipelining import microbatch
from taktline.compat.torch_pipelining import schedules as torchs
from taktline.compat.torch_pipelining._calls import CallProgram, Calls
from taktline.compat.torch_pipelining._metadata import RemoteError, is_whole, set_metadata
from taktline.compat.torch_pipelining._stages import _PipelineStageBase, reduced
from taktline.errors import (
    BatchError,
    BatchTypeError,
    InvalidBatchError,
    PipeliningMetadataError,
    ScheduleError,
    SignatureError,
    StageUseError,
    TaktlineError,
    restore,
    text_of,
)
from taktline.pytree import tree_map_only
from taktline.runtime.agreement import warn_if_uneven
from taktline.runtime.microbatch import Batch, Cutter, Feed
from taktline.runtime.program import Program
from taktline.runtime.runner import Runner
from taktline.runtime.schedule import Schedule
from taktline.runtime.stage_actions import Signatures
from taktline.transport import transport_of
from taktline.transport.exchange import exchange_or_raise

MODES: Any = getattr(torchs, "InferenceMode", None)
"""How stages learn their metadata, since torch 2.12."""

Cut = tuple[list[Any], list[Any], list[Any] | None]
"""Arguments, keyword arguments and targets of each micro-batch."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """The arguments of a step: args, kwargs and target, whole or as micro-batches."""

    whole: tuple[tuple[Any, ...], dict[str, Any], Any]
    parts: tuple[list[Any] | None, list[Any] | None, list[Any] | None]
    losses: list[Any] | None
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None

    def microbatches(self, schedule: Any) -> Cut:
        """The micro-batches; each argument is cut by itself, whatever the others' sizes."""
        args, kwargs, target = self.whole
        names, given = ("arg_mbs", "kwarg_mbs", "target_mbs"), (args, kwargs, target is not None)
        for name, parts, whole in zip(names, self.parts, given, strict=True):
            if parts is not None and whole:
                raise BatchError(f"pass {name} or the whole batch, not both")
        if self.losses is not None:
            schedule._check_inputs(losses=self.losses)
        if not schedule._has_backward:
            # Torch would retain the gradients of chunks.
            detached = tree_map_only(torch.Tensor, torch.Tensor.detach, self.whole)
            args, kwargs, target = detached
        count = schedule._n_microbatches
        made = (*schedule._split_inputs(args, kwargs), _parts_of_target(target, count))
        cut: Any = [m if p is None else p for m, p in zip(made, self.parts, strict=True)]
        for name, chunks in zip(("args", "kwargs", "target"), cut, strict=True):
            if chunks is not None and len(chunks) != count:
                raise BatchError(
                    f"{name} make {len(chunks)} micro-batches, but the schedule runs {count}; the "
                    f"batch has {len(chunks)} along dimension 0: pass at least {count}"
                )
        return tuple(cut)


def _parts_of_target(target: Any, count: int) -> list[Any] | None:
    if isinstance(target, torch.Tensor):
        spec = getattr(torchs, "_TARGET_CHUNK_SPEC", microbatch.TensorChunkSpec(0))
        return [*microbatch._split_tensor(target, spec, count)]
    if target is None:
        return None
    return [part for (part,) in microbatch.split_args_kwargs_into_chunks((target,), None, count)[0]]


def run(schedule: Any, call: StepCall) -> Any:
    """Run one step; returns the outputs where the last stage is."""
    trains = schedule._has_backward and getattr(schedule, "_backward_requires_autograd", True)
    if trains and not torch.is_grad_enabled():
        raise StageUseError(
            "step() requires gradients to be enabled for backward computation; it should not be "
            "used under torch.no_grad() context. Please call eval() instead."
        )
    stages = schedule._local_stages
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.chunks = schedule._n_microbatches
        stage.clear_runtime_states()
    make_plan = schedule._plan_maker()
    own = all(isinstance(stage, _PipelineStageBase) and is_whole(stage) for stage in stages)
    way = _agreed(schedule) if make_plan is not None and own else _AS_TORCH
    if schedule._on_ours and way != _NATIVELY:
        schedule._note_shapes(known=False)  # torch's stages have no metadata of steps on ours
    schedule._on_ours = way == _NATIVELY
    if make_plan is None or way == _AS_TORCH:
        return _by_itself(schedule, call)
    native, made_with = schedule._native, (schedule._on_ours, _settings(schedule, make_plan))
    if native is None or native.made_with != made_with:
        native = schedule._native = Native(schedule, *made_with)
    return native.run(schedule, call)


def _by_itself(schedule: Any, call: StepCall) -> Any:
    """Run a user's own step, or a step on stages that are not ours, without agreement of ranks."""
    args, kwargs, targets = call.microbatches(schedule)
    if targets and schedule.scale_grads and not getattr(schedule, "_warned", False):
        schedule._warned = warn_if_uneven(0, targets)
    # Passed only if there are any: classes that were written for older torch do not take them.
    loss_kwargs = {} if call.loss_kwargs is None else {"loss_kwargs": call.loss_kwargs}
    stages = schedule._local_stages
    with reduced(schedule, stages):
        schedule._step_microbatches(
            args, kwargs, targets, call.losses, call.return_outputs, **loss_kwargs
        )
    for stage in stages:
        if stage.is_last and call.return_outputs:
            return schedule._merge_outputs(stage.output_chunks)
    return None


_AS_TORCH, _BY_CALLS, _NATIVELY = range(3)
"""How a step runs: as torch would, by calls on Taktline's runtime, on Taktline's own stages."""


def _agreed(schedule: Any) -> int:
    """How a step runs, the same on every rank.

    Ranks agree before the first step. A program that later gives an action a custom function, or
    overrides a method, does so on every rank.
    """
    stages = schedule._local_stages
    mine = _NATIVELY
    # With runtime validation, a rank raises by itself, before anything is sent.
    if schedule._has_own_step() or any(stage._runtime_validate for stage in stages):
        mine = _AS_TORCH
    elif (
        getattr(schedule, "_comp_type_to_function_map", None)
        or any(_is_overridden(value) for value in (schedule, *stages))
        or any(stage.expects_dtensors for stage in stages)
        or any(getattr(stage, "_forward_contexts", None) for stage in stages)
    ):
        mine = _BY_CALLS
    if schedule._way is None:
        transport = transport_of(stages[0].group, torch.device(stages[0].device))
        asking = [stage for stage in stages if hasattr(stage, "_user_meta")]
        asks = [MODES.needs_dynamic(s._user_meta, schedule._has_backward) for s in asking]
        mine_and_more = [mine, any(asks), schedule._is_idle]
        votes = transport.exchange(mine_and_more, "a schedule's first step")
        way, idle = min(vote[0] for vote in votes), [r for r, vote in enumerate(votes) if vote[2]]
        if idle and way != _NATIVELY:
            raise ScheduleError(
                f"rank {idle[0]} has nothing to do in this order, which works only where no method "
                "of schedule and stages is overridden and no action has a function of its own; "
                "give the rank a stage, or leave these out"
            )
        schedule._way = way
        for stage in asking:
            stage._inference_mode = (
                MODES.DYNAMIC if any(vote[1] for vote in votes) else MODES.STATIC
            )
    schedule._way = min(schedule._way, mine)
    return schedule._way


class _Runner(Runner):
    """Runs steps on Taktline's own stages, or by calls to torch's."""

    theirs: Sequence[Any] = ()
    """torch's stages."""
    calls: Calls | None = None
    """The calls of the running step, if it runs by calls."""
    compared = ()  # in torch, ranks may get arguments that they do not use
    refusal: BatchError | None = None
    """Why the batch of the running step cannot be cut."""
    schedule: Any = None
    """torch's schedule."""

    def cutter_for(self, batch: Batch) -> Cutter:
        """How a batch is cut; raises if it cannot be."""
        if self.refusal is not None:
            raise self.refusal
        return self.cutter

    def merged(self, feed: Feed) -> Any:
        """The outputs of the micro-batches as one, if they are wanted."""
        if self.calls is not None:
            self.calls.finish()
        if feed.outputs is None:
            return None
        last = next(stage for stage in self.theirs if stage.is_last)
        if self.calls is None:
            last.output_chunks[:] = [feed.outputs[m] for m in sorted(feed.outputs)]
        return self.schedule._merge_outputs(last.output_chunks)

    def _bind(self, known: Signatures | None, trains: bool) -> Program:
        if self.calls is None:
            return super()._bind(known, trains)
        # For each step, as any method may have been overridden.
        return CallProgram(self.calls, self._binding(trains))

    def _remember(self, kind: tuple[int, ...], known: Signatures | Program) -> None:
        """Remember a program, unless it is made of calls; once signatures are known, set them."""
        if self.calls is not None:
            return
        super()._remember(kind, known)
        if isinstance(known, Program):
            return
        feed = self._feed
        for stage in self.theirs:
            sides: list[Any] = []
            for table, values in ((known.arriving, feed.arguments), (known.leaving, feed.outputs)):
                signatures = table.get(stage.stage_index)
                sides.append(signatures[0].tensors if signatures else values[0] if values else None)
            set_metadata(stage, *sides)


class Native(Schedule):
    """The schedule of Taktline that runs one of these."""

    _runner_type = _Runner
    _runner: _Runner

    def __init__(self, theirs: Any, on_ours: bool, settings: dict[str, Any]) -> None:
        self.made_with = (on_ours, settings)
        nothing = ("args_chunk_spec", "kwargs_chunk_spec", "output_merge_spec", "seed")
        stages = [stage.native for stage in theirs._running_stages]
        idle = theirs._local_stages[0].native
        super().__init__(stages, **settings, **dict.fromkeys(nothing), idle=idle)
        self._runner.theirs = theirs._running_stages
        self._runner.schedule = proxy(theirs)

    def run(self, theirs: Any, call: StepCall) -> Any:
        """Run one step."""
        try:
            cut, self._runner.refusal = call.microbatches(theirs), None
        except Exception as error:
            cut, self._runner.refusal = (None, None, None), _refusal(error)
        for stage in theirs._local_stages:
            _ = stage.native  # updates it to the stage's current module
        losses = call.losses if self._runner.refusal is None else None
        step: Any = self.step if theirs._has_backward else self.eval
        try:
            if not theirs._on_ours:
                context = torchs._PipelineContext(theirs, *cut, call.losses)
                calls = Calls(theirs, context, call.return_outputs, call.loss_kwargs)
                self._prepare(theirs, calls)
                self._runner.calls, losses = calls, None  # the calls compute the losses
            merged = step(
                **dict(zip(("arg_mbs", "kwarg_mbs", "target_mbs"), cut, strict=True)),
                losses=losses,
                return_outputs=bool(call.return_outputs),
                loss_kwargs=call.loss_kwargs,
                **({} if theirs._finalize_gradients else {"finalize_gradients": False}),
            )
        except TaktlineError as error:
            raise as_in_torch(error) from error.__cause__
        finally:
            self._runner.calls = None
        theirs._note_shapes(known=True)
        return merged

    def _prepare(self, theirs: Any, calls: Calls) -> None:
        """Let stages find their metadata; an error on one rank is raised on all."""
        transport, sizes = self._runner.transport, calls.sizes()
        changed, theirs._sizes = theirs._sizes not in (None, sizes), sizes
        try:
            votes = exchange_or_raise(transport, self._runner.refusal, "a step by calls", [changed])
            if any(vote for (vote,) in votes):
                theirs._note_shapes(known=False)  # batches of another size on some rank
            exchange_or_raise(transport, self._failure(calls), "the metadata of stages")
        except TaktlineError:
            theirs._note_shapes(known=False)
            raise

    def _failure(self, calls: Calls) -> TaktlineError | None:
        """Why stages of this rank cannot find their metadata; None if they have."""
        try:
            calls.prepare()
        except RemoteError:
            pass  # the rank that has failed reports the error
        except Exception as raised:
            misfit = isinstance(raised, PipeliningMetadataError)
            kind, text = (type(raised), raised) if misfit else (StageUseError, _refusal(raised))
            error = kind(f"rank {self._runner.transport.rank}: {text}")
            error.__cause__ = raised
            return error
        return None


def _settings(schedule: Any, make_plan: Any) -> dict[str, Any]:
    return {
        "name": type(schedule).__name__,
        "make_plan": make_plan,
        "n_microbatches": schedule._n_microbatches,
        "loss_fn": schedule._loss_fn,
        "scale_grads": schedule.scale_grads,
        "dynamic_shapes": schedule.dynamic_shapes,
        "limits": schedule._limits,
    }


def _refusal(error: Exception) -> BatchError:
    if isinstance(error, BatchError):
        return error
    kinds = {TypeError: BatchTypeError, AssertionError: InvalidBatchError}
    kind = next((kinds[builtin] for builtin in kinds if isinstance(error, builtin)), BatchError)
    refusal = kind(f"{type(error).__name__}: {text_of(error)}")
    refusal.__cause__ = error
    return refusal


def as_in_torch(error: TaktlineError) -> TaktlineError:
    """The same error for code that expects the errors of torch.

    That is a RuntimeError, and a PipeliningMetadataError if a value has other metadata.

    >>> from taktline.errors import MismatchError
    >>> error = as_in_torch(MismatchError("the ranks disagree"))
    >>> isinstance(error, RuntimeError), isinstance(error, MismatchError)
    (True, True)
    """
    args, kind = error.args, RuntimeError
    misfit = next((e for e in (error, error.__cause__) if isinstance(e, SignatureError)), None)
    if misfit is not None:
        kind = PipeliningMetadataError
        args = (f"{error} ({misfit.differs} mismatch)",) if misfit.differs else args
    return error if isinstance(error, kind) else _restored(type(error), kind, args, vars(error))


def _restored(cls: Any, kind: Any, args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    return restore(_both(cls, kind), args, fields)


@cache
def _both(cls: type[TaktlineError], kind: type[Exception]) -> type[TaktlineError]:
    def reduce(error: TaktlineError) -> tuple[Any, ...]:  # so that it can be pickled
        return _restored, (cls, kind, error.args, vars(error))

    attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, kind), attributes)


_METHODS: dict[type, dict[str, Any]] = {}
"""The methods that classes were defined with, by their names."""


def remember(*classes: type) -> None:
    """Remember the methods of classes whose instances can run on Taktline's own stages."""
    for cls in classes:
        names = (name for name in dir(cls) if not name.startswith("__"))
        _METHODS[cls] = {name: m for name in names if isfunction(m := getattr(cls, name))}


def _is_overridden(value: object) -> bool:
    """Whether an object overrides a method that its class was defined with."""
    cls = type(value)
    defined = next((_METHODS[base] for base in cls.__mro__ if base in _METHODS), None)
    if defined is None or not defined.keys().isdisjoint(vars(value)):
        return True
    return any(getattr(cls, name) is not method for name, method in defined.items())
