"""Runs the steps of one schedule in one process: agrees with the other ranks, binds, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd import profiler

from taktline.batch_norm import update_all
from taktline.errors import BatchError, MismatchError, TaktlineError, text_of
from taktline.plan import Plan
from taktline.runtime import updates
from taktline.runtime.agreement import (
    Agreement,
    Record,
    compared,
    difference,
    fingerprints,
    hand_over,
    inputs_of,
    located,
    relayed,
    weigh,
)
from taktline.runtime.capture.captures import Captures
from taktline.runtime.introduction import introduce, options_of, whole_model
from taktline.runtime.microbatch import Batch, Call, Cutter, Feed, merge_chunks
from taktline.runtime.program import Failure, Program, bind, channels_of
from taktline.runtime.replicas import Replicas
from taktline.runtime.runnable_plan import Limits, Runnable
from taktline.runtime.stage_actions import Binding, Signatures, random_states
from taktline.runtime.ties import Ties, uses_of
from taktline.runtime.trace import TraceRecorder, run_named
from taktline.runtime.watchdog import STALL_SECONDS, Watch, guarded
from taktline.stage import PipelineStage
from taktline.stage.names import Blueprint
from taktline.text import by_rank, counted
from taktline.transport import Channel, Transport, transport_of
from taktline.transport.base import Alone, Turn
from taktline.transport.distributed import Distributed

_READ_AT_ONCE = ("cpu",)
"""The devices whose results can be read without a wait."""
_REMEMBERED = 8
"""The most kinds of steps whose programs are kept."""
_numbered: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()
"""How many schedules have begun their first step on the same ranks."""


class Runner:
    """Runs the steps of one schedule on this rank, or on all ranks if they are in this process.

    :meth:`run` is a call of step() or eval(), from its beginning to its end.
    """

    compared: Sequence[str] = ("args", "target")
    """The parts of a batch that must be the same on every rank that gets them."""
    recorder: TraceRecorder | None = None
    """Records the steps, while there is a trace."""
    stall_after: float | None = STALL_SECONDS
    check_finite = False
    loss: torch.Tensor | None = None
    """The mean loss of the last call, if every rank got the losses."""
    stepped_at = 0
    """When the latest training step has ended; 0 before the first one, and after a load."""
    unreduced = False
    """Whether the running ``accumulate()`` has gradients of a step."""
    _failed = False
    """Whether the latest call has raised: then all ranks know."""
    _warned = False
    """Whether it was said that micro-batches of equal weight differ in size."""
    _number = 0
    """Which schedule of these ranks it is, by their first steps; 0 before."""
    _model: Blueprint = ()
    """Of the model that the stages were cut from, if it is known."""
    all_ranks = 0
    """How many ranks there are, where they run in this process, in one thread."""
    _draws = False
    """Whether a first step has drawn random numbers, where all stages run in this thread."""
    captures: Captures | None = None
    """Captures programs, and replays them."""
    _calls = 0

    def __init__(
        self,
        name: str,
        make_plan: Callable[[int], Plan],
        stages: Sequence[PipelineStage],
        cutter: Cutter,
        *,
        loss_fn: Callable[..., torch.Tensor] | None,
        merge_spec: Any = None,
        seed: int | None,
        dynamic_shapes: bool,
        limits: Limits,
        idle: PipelineStage | None = None,
    ) -> None:
        """A rank without stages has the group and device of the stage ``idle``."""
        self._name = name
        self._turn = Turn(name)
        self._make_plan = make_plan
        self._stages = list(stages)
        anywhere = idle or self._stages[0]
        self._group, self.device = anywhere.group, anywhere.device
        self.cutter = cutter
        self._loss_fn = loss_fn
        self._has_last = any(stage.is_last for stage in self._stages)
        self._computes_losses = loss_fn is not None and self._has_last
        self.merge_spec = merge_spec
        self._seed = seed
        self._dynamic_shapes = dynamic_shapes
        self._limits = limits
        self.replicas = Replicas(self._stages)
        self._ties = Ties(self._stages)
        self._channels: list[Channel] = []
        self._feed = Feed()
        self._known: dict[tuple[int, ...], Signatures | Program] = {}
        """The latest kinds of steps, by mode and by the inputs of all ranks; equal on all ranks."""

    def run_all_ranks(self, count: int) -> None:
        """Run all ranks of the plan in one thread, where messages are handed over as they are."""
        self.all_ranks, self.transport = count, Alone()

    @property
    def ranks(self) -> range:
        """The ranks that run in this process."""
        first = self.transport.rank
        return range(first, first + (self.all_ranks or 1))

    @cached_property
    def transport(self) -> Transport:
        """The connections to the other ranks."""
        return transport_of(self._group, self.device)

    @cached_property
    def agreement(self) -> Agreement:
        """Raises the errors that all ranks raise."""
        return Agreement(self.transport, self.replicas, self._feed)

    @cached_property
    def runnable(self) -> Runnable:
        """The plan, for training and for evaluation."""
        plan = self._make_plan(self.transport.size * len(self.ranks))
        return Runnable(plan, self._limits)

    @cached_property
    def _watch(self) -> Watch:
        transport = self.transport if isinstance(self.transport, Distributed) else None
        return Watch(self._name, transport)

    # A call of step() or eval(), from its beginning to its end.

    def run(self, call: Call) -> Any:
        """Run a batch; returns the outputs where the last stage is. Every rank raises an error."""
        watch = self._watch
        watch.seconds, watch.program, self._failed = self.stall_after, None, True
        with self._turn, watch if isinstance(self.transport, Distributed) else nullcontext():
            try:
                return self._run(call)
            except BaseException as raised:  # also Ctrl-C, or a wait in a group that is not ours
                error = self._abandon(raised)
                if error is raised:
                    raise
                raise error from raised

    def _run(self, call: Call) -> Any:
        feed, output, failure, error = self._feed, None, None, None
        record, data, feed.call = Record(), (None, None), call
        try:
            call.check()
            record, data = self._cut(call, self._check())
        except Exception as raised:
            error = located(raised, self.transport)
        kind = self._agree(call, record, data, error)
        try:
            self._weigh(call)
        except Exception as raised:
            failure = Failure(located(raised, self.transport))
        known = self._known.pop(kind, None)
        program = known if isinstance(known, Program) else self._bind(known, call.trains)
        with self._ties.step(trains=call.trains) if self._ties.there else nullcontext():
            states = random_states(self.device) if known is None else []
            failure = self._compute(kind, program, failure)
            if states:
                self._draws |= not all(map(torch.equal, states, random_states(self.device)))
            if failure is None:
                try:
                    output = self.merged(feed)
                except Exception as raised:
                    failure = Failure(located(raised, self.transport))
            got = {index: sorted(work.got) for index, work in program.works.items() if work.got}
            routes = self.agreement.conclude(failure, "the end of a step", got)
            program.settle()
        if self.recorder is not None:
            self.recorder.keep()
        if not self._dynamic_shapes:
            self._remember(kind, program.learned().along(routes) if known is None else program)
        self._failed = False
        if call.trains:
            self.stepped_at, self.unreduced = next(updates.times), self._ties.accumulating
        if feed.observed:
            update_all(feed.observed)
        self.loss = hand_over(feed)
        feed.clear()
        return output

    def _abandon(self, raised: BaseException) -> BaseException:
        """Leave a call after an error, of which the other ranks hear; returns the cause."""
        if self._feed.microbatches:  # the ranks have begun
            self._forget()
        self._feed.clear()
        if not isinstance(transport := self.transport, Distributed):
            return raised
        ours = isinstance(raised, TaktlineError)
        error = raised if ours else transport.explain(raised) or raised
        if not ours or raised.recoverable != "step" or transport.verdict is not None:
            transport.raised(error, self._watch.where())
            transport.mark(error)
        return error

    def _check(self) -> list[str]:
        """Raise if a stage does not fit: all checks before the first step, ties before each.

        Returns what the stages and autocast say of the call.
        """
        if not self._number:
            count = self.runnable.plan.stages
            for stage in self._stages:
                if stage.num_stages != count:
                    raise MismatchError(
                        f"stage {stage.stage_index} is one of {stage.num_stages} (num_stages), but "
                        f"the plan has {counted(count, 'stage')}; make them equal"
                    )
            self.replicas.check(self.transport)
            self._model = whole_model(self._stages)
        if not self._number or self._ties.uses:
            self._ties.check()
        if not self._feed.call.finalizes and self._ties.uses and self.replicas.shards:
            raise MismatchError(
                "finalize_gradients=False leaves gradients of sharded stages unreduced, but "
                "tied weights need them; use accumulate()"
            )
        return [_autocast(self.device), *(str(stage.begin()) for stage in self._stages)]

    def _cut(self, call: Call, flags: Sequence[str]) -> tuple[Record, tuple[Any, Any]]:
        """Cut the arguments; returns what the batch says of this call, and the compared data."""
        feed, batch = self._feed, call.batch
        if call.outputs and self._has_last:
            feed.outputs = {}
        batch.cutter = self.cutter_for(batch)
        mine = batch
        if not any(stage.is_first for stage in self._stages):
            mine = replace(batch, args=(), arg_mbs=None)  # keyword arguments are for all stages
        rows, feed.arguments, feed.keywords = mine.cut()
        target = 0
        if self._computes_losses:
            if call.trains and batch.target is None and batch.target_mbs is None:
                raise BatchError(
                    "step() trains, so the rank of the last stage needs target=… for loss_fn; "
                    "call eval() to run forward only"
                )
            size = batch.target_size()
            target = size if batch.cutter.target_spec is None else 0
        record = Record(batch=rows, target=target, inputs=inputs_of(mine, flags))
        return record, compared(batch, self.compared)

    def cutter_for(self, batch: Batch) -> Cutter:
        """How a batch is cut; an error that it raises is raised on every rank."""
        return self.cutter

    def _agree(
        self, call: Call, record: Record, data: Sequence[Any], error: TaktlineError | None
    ) -> tuple[int, ...]:
        """Raise unless all ranks are about to do the same; ``error``: this rank cannot.

        Returns the kind of step: mode, micro-batches and inputs of all ranks.
        """
        self._watch.doing = "begins a step"
        number, digests = 0, [0, 0]
        if isinstance(self.transport, Distributed):
            # Not on local ranks: they get the same objects, and Ctrl-C may skip calls of some.
            number = self._calls + 1
            digests = fingerprints(number, data)
        mine = record._replace(
            failed=error is not None,
            schedule=self._number,
            call=number,
            step=call.number,
            shares=bool(call.share_losses),
            traces=self.recorder is not None,
            arguments=digests[0],
            targets=digests[1],
        )
        with self.agreement.with_replicas(str(call)):
            records = self.agreement.share(mine, error, str(call))
            if reason := difference(records):
                raise MismatchError(reason)
            self._calls = number
            if not self._number:
                self._introduce()
        rows = max(record.batch for record in records)
        self._feed.rows, self._feed.microbatches = rows, self.cutter.parts(rows)
        return call.trains, self._feed.microbatches, *(record.inputs for record in records)

    def _introduce(self) -> None:
        """Before the first step: compare the parts of all ranks, and open the channels."""
        plan, replicas, ties = self.runnable.plan, self.replicas, self._ties
        rank_of = [rank // len(self.ranks) for rank in plan.placement.rank_of]
        loss = None if self._loss_fn is None else "given"
        options = options_of(self._name, plan, loss_fn=loss, dynamic_shapes=self._dynamic_shapes)
        mine = {
            "stages": [stage.stage_index for stage in self._stages],
            "shards": replicas.shards or any(each.streamed for each in self._stages),
            "reduces": replicas.reduces,
            "in_company": bool(replicas.partners),
            "ties": [use.plain for use in ties.uses],
            "number": _numbered.get(self.transport, 0) + 1,
        }
        ranks = introduce(self.transport, mine, options, self._model, rank_of)
        # The same plan on every rank, though only some of them may hold wrapped stages.
        any_of = {name: any(rank[name] for rank in ranks) for name in ("shards", "reduces")}
        self.runnable.wrap(**any_of)
        in_company = [rank["in_company"] for rank in ranks]
        if len(set(in_company)) > 1:
            # Those that share their work know of an error elsewhere, and pass it on to the others.
            replicas.partners.append(("rank", self.transport))
        if isinstance(self.transport, Distributed):
            self.transport.plane.in_company |= any(in_company)
        channels = ties.find_holders([uses_of(rank["ties"]) for rank in ranks])
        if not self.all_ranks:
            channels |= set(channels_of(self.runnable.plan))
        self._channels = sorted(channels)
        self.transport.open(self._channels)
        ties.begin(self.transport)
        if self.transport.size > 1 and self.device.type not in _READ_AT_ONCE:
            self.agreement.relay = partial(relayed, self.transport, rank_of, self.device)
        updates.watch()
        self._number = _numbered[self.transport] = ranks[0]["number"]

    def _weigh(self, call: Call) -> None:
        """Cut the target and weigh micro-batches, now that all ranks know the rows of the batch."""
        feed = self._feed
        call.batch.check(feed.rows)
        if self._computes_losses:
            feed.targets = call.batch.targets(feed.rows)
        self._warned = weigh(feed, self.cutter, warned=self._warned)

    def _compute(
        self, kind: tuple[int, ...], program: Program, failure: Failure | None
    ) -> Failure | None:
        """Run a program; returns its failure.

        After a failure, run nothing, but take part, so that the other ranks hear of it.
        """
        feed, watch = self._feed, self._watch
        wrapped, recorder = self.replicas.reduces, self.recorder
        # Read once a step: the flag changes when a profiler starts and stops.
        profiled = getattr(profiler, "_is_profiler_enabled", True)
        observed = nullcontext(run_named if profiled else None)
        # Buffers outlive the step, so they must not be made in inference mode.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(feed.call.trains),
            torch.autograd.set_multithreading_enabled(False),
            self.replicas.step(finalizes=feed.call.finalizes) if wrapped else nullcontext(),
            program.step(),
            recorder.watch(program, self.transport, profiled) if recorder else observed as observe,
        ):
            watch.program, program.position = program, 0
            captures = None if observe else self.captures
            if failure is None and (captures is None or not captures.replay(kind, program)):
                failure = program.run(observe)
                if failure is not None and (error := failure.error) is not None:
                    self.agreement.judge(error.__cause__ or error, error)
                elif failure is None and captures is not None:
                    captures.note(program)
            if failure is not None:
                for error in program.forgo():
                    self.agreement.judge(error)
        watch.program, watch.doing = None, "adds up gradients of tied weights"
        if self._ties.there:
            self._ties.add_up()
        watch.doing = "ends a step"
        return failure

    def merged(self, feed: Feed) -> Any:
        """The outputs of the micro-batches as one, if they are wanted."""
        if feed.outputs is None:
            return None
        parts = [feed.outputs[m] for m in range(feed.microbatches)]
        try:
            return merge_chunks(parts, self.merge_spec)
        except BatchError as error:
            raise BatchError(
                f"{error}; pass return_outputs=False if you do not need them"
            ) from error

    def _forget(self) -> None:
        """Drop the running step after a failure, and all that may be wrong because of it."""
        self._feed.clear()
        self._known.clear()
        if self.captures is not None:
            self.captures.forget()
        for stage in self._stages:
            stage.clear()

    def _bind(self, known: Signatures | None, trains: bool) -> Program:
        return bind(self._binding(trains), known)

    def _binding(self, trains: bool) -> Binding:
        """All that the program of a step is made from."""
        return Binding(
            self.runnable.program(self._feed.microbatches, trains=trains),
            {stage.stage_index: stage for stage in self._stages},
            self.transport,
            self._feed,
            self._loss_fn,
            self._seed,
            trains,
            sends_may_wait=not trains or self.runnable.sends_may_wait,
            most_sends=self._limits.max_outstanding_sends,
            alone=self.transport.size == 1,
            draws=self._draws,
            check_finite=self.check_finite,
        )

    def _remember(self, kind: tuple[int, ...], known: Signatures | Program) -> None:
        # Put last, so that the first one is always the longest unused.
        self._known[kind] = known
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    # Between calls.

    def awaits_update(self) -> bool:
        """Whether gradients of steps on this rank wait for an optimizer."""
        if self.unreduced or not self.stepped_at:
            return self.unreduced
        found = (each for stage in self._stages for each in stage.submod.parameters())
        waiting = [each for each in found if each.grad is not None]
        return bool(waiting) and updates.wait(waiting, self.stepped_at)

    def connect(self) -> None:
        """Open the channels now, so that the first step does not wait; on every rank, one plan."""
        if isinstance(self.transport, Distributed):
            self._channels = sorted(channels_of(self.runnable.plan))
            self.transport.open(self._channels)

    def restart(self, steps: int) -> None:
        """Continue over new connections after ``steps`` training steps; on every rank."""
        self._forget()
        self._calls = 0
        self.transport.open(self._channels)
        ended = [number for (number,) in self.transport.exchange([steps], "reconnect()")]
        if len(set(ended)) > 1:
            error = MismatchError(
                f"the latest step has ended on some ranks only (training steps: {by_rank(ended)}), "
                "so their weights may differ; load a checkpoint on every rank, and set steps of "
                "the schedules"
            )
            error.recoverable = "restart"
            raise error

    def arrive(self, what: str) -> None:
        """Raise unless every rank is in the same call, which may wait in collectives.

        Only where ranks share their work with other pipelines: elsewhere all waits are our own.
        """
        if isinstance(self.transport, Distributed) and self.transport.plane.in_company:
            with self.agreement.with_replicas(what):
                self.transport.exchange([], what)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, gradients stay on their ranks; at the end they are reduced over all of them."""
        outer = self._ties.accumulating
        with self._ties.step(trains=False):
            self._accumulate(True)
            try:
                yield
            except BaseException as raised:
                self._accumulate(outer)
                self.replicas.forget()
                if isinstance(raised, Exception) and not self._failed:
                    error = MismatchError(
                        f"rank {self.transport.rank} has left accumulate() by an error, so nothing "
                        f"was added up: {type(raised).__name__}: {text_of(raised)}"
                    )
                    with suppress(TaktlineError):  # the other ranks are in another call
                        self._end_accumulating(Failure(error))
                raise
            self._accumulate(outer)
            self._end_accumulating()

    def _accumulate(self, accumulating: bool) -> None:
        self._ties.accumulating = accumulating
        self.unreduced = self.unreduced and accumulating
        self.replicas.accumulate(accumulating)

    def _end_accumulating(self, failure: Failure | None = None) -> None:
        """Reduce gradients over the ranks; a failure of one rank is raised on all."""
        if self._ties.accumulating or not (self._ties.there or self.runnable.reduces):
            return
        self._feed.clear()  # there are no losses to share
        what = "the end of accumulate()"
        # Before any collective: a rank in another step would not answer.
        self.agreement.conclude(failure, what)
        with guarded(self.transport, what):
            self.replicas.catch_up()
            self._ties.add_up()


def _autocast(device: torch.device) -> str:
    """The types of autocast, which decide what crosses boundaries."""
    kinds = dict.fromkeys(("cpu", device.type))
    return str([torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)])
