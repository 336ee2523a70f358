"""Runs the steps of one schedule in one process: agrees with the other ranks, binds, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import torch

from taktline.errors import MismatchError, TaktlineError, text_of
from taktline.plan import Plan
from taktline.runtime import updates
from taktline.runtime.agreement import (
    WHICH_STEP,
    Agreed,
    Agreement,
    Record,
    ScheduleNumber,
    difference,
    other_kind,
    repeatable,
    warn_of_no_effect,
)
from taktline.runtime.bind import Bound, bind, channels_of
from taktline.runtime.capture import Captures, CudaGraphs, Graphs
from taktline.runtime.fingerprint import DataCheck, digest_of
from taktline.runtime.introduction import digest, examples, introduce, whole_model
from taktline.runtime.losses import LossRelay
from taktline.runtime.program import Failure
from taktline.runtime.random_numbers import Drawing, RankRandom
from taktline.runtime.replicas import Replicas
from taktline.runtime.runnable_plan import Limits, Runnable
from taktline.runtime.step_data import Binding, Feed, Signatures
from taktline.runtime.ties import Ties
from taktline.runtime.trace import TraceRecorder, watching
from taktline.runtime.watchdog import STALL_SECONDS, Watch, guarded
from taktline.stage import PipelineStage
from taktline.stage.blueprint import Blueprint
from taktline.text import by_rank, counted
from taktline.transport import Channel, Transport, transport_of
from taktline.transport.distributed import Distributed
from taktline.transport.one_rank import Alone
from taktline.transport.turn import Turn

_REMEMBERED = 8
"""The most kinds of steps whose programs are kept."""


class Runner:
    """Runs the steps of one schedule on this rank, or on all ranks if they are in this process.

    A schedule makes these calls for a step, and every rank raises the same error::

        with runner.call(…) as feed:
            kind = runner.agree(record, data, error)     with the other ranks, on the step
            failure = runner.compute(kind, failure)      the program
            runner.conclude(failure)                     with the other ranks, on the outcome
    """

    recorder: TraceRecorder | None = None
    """Records the steps, while there is a trace."""
    stall_after: float | None = STALL_SECONDS
    check_finite = False
    stepped_at = 0
    """When the latest training step has ended; 0 before the first one, and after a load."""
    unreduced = False
    """Whether the running ``accumulate()`` has gradients of a step."""
    runs_ahead = False
    """Whether the user allows steps without an exchange."""
    _repeatable: Agreed | None = None
    """The latest step, if others like it need no exchange."""
    _warned = False
    """Whether it was logged that run_ahead has no effect."""
    _failed = False
    """Whether the latest call has raised: then all ranks know."""

    # Of the running call:
    _record = Record()
    """What this rank says of it."""
    _flags: Sequence[str] = ()
    """What the stages and autocast say of it."""
    _kind: tuple[int, ...] = ()
    _bound: Bound | None = None
    """Its program."""
    _learns = False
    """Whether the program finds out what crosses boundaries."""
    _end = ExitStack()
    """Closed at its end."""

    def __init__(
        self,
        name: str,
        make_plan: Callable[[int], Plan],
        stages: Sequence[PipelineStage],
        microbatches: int,
        *,
        loss_fn: Callable[..., torch.Tensor] | None,
        parts: Callable[[int], int],
        seed: int | None,
        dynamic_shapes: bool,
        limits: Limits,
        idle: PipelineStage | None = None,
    ) -> None:
        """``parts`` returns the number of micro-batches for a number of rows.

        A rank without stages has the group and device of the stage ``idle``.
        """
        self._name = name
        self._turn = Turn(name)
        self._make_plan = make_plan
        self._stages = list(stages)
        anywhere = idle or self._stages[0]
        self._group, self.device = anywhere.group, anywhere.device
        self._microbatches = microbatches
        self._loss_fn = loss_fn
        self._parts = parts
        self._seed = seed
        self._dynamic_shapes = dynamic_shapes
        self._limits = limits
        self.replicas = Replicas(self._stages)
        self._ties = Ties(self._stages)
        self._blueprint: Blueprint = ()
        """Of the model that the stages were cut from, if it is known."""
        self._reduces = self._in_company = False
        """Whether a stage of any rank averages its gradients, or shares its work in any way."""
        self._random: RankRandom | None = None
        """The random numbers of all ranks, where they run in this process."""
        self._drawing: Drawing | None = None
        """The same; or finds out whether a single rank draws."""
        self._identity = ScheduleNumber(self._group)
        self._calls = 0
        self._channels: list[Channel] = []
        self._data = DataCheck()
        self._feed = Feed()
        self._captures: Captures | None = None
        self._known: dict[tuple[int, ...], Signatures | Bound] = {}
        """The latest kinds of steps, by mode and by the inputs of all ranks; equal on all ranks."""

    def capture(self, graphs: Graphs | None = None) -> None:
        """Capture programs as CUDA graphs, or with ``graphs``, and replay them."""
        self._captures = Captures(
            graphs or CudaGraphs(self.device), self._stages, dynamic_shapes=self._dynamic_shapes
        )

    @property
    def captured(self) -> str:
        """The captured programs, as text; empty without captures."""
        return "" if self._captures is None else str(self._captures)

    def awaits_update(self) -> bool:
        """Whether gradients of steps on this rank wait for an optimizer."""
        if self.unreduced or not self.stepped_at:
            return self.unreduced
        parameters = (each for stage in self._stages for each in stage.submod.parameters())
        return updates.wait(parameters, self.stepped_at)

    def run_all_ranks(self, count: int) -> None:
        """Run all ranks of the plan in one thread, where messages are handed over as they are."""
        self._random = self._drawing = RankRandom(count, self.device)
        self.transport = Alone()

    @property
    def ranks(self) -> range:
        """The ranks that run in this process."""
        if self._random is not None:
            return range(self._random.ranks)
        return range(self.transport.rank, self.transport.rank + 1)

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
        return Runnable(plan, limits=self._limits)

    @cached_property
    def _watch(self) -> Watch:
        transport = self.transport if isinstance(self.transport, Distributed) else None
        return Watch(self._name, transport)

    def connect(self) -> None:
        """Open the channels now, so that the first step does not wait; on every rank, one plan."""
        if isinstance(self.transport, Distributed):
            self._channels = sorted(channels_of(self.runnable.plan))
            self.transport.open(self._channels)

    def restart(self, steps: int) -> None:
        """Continue over new connections after ``steps`` training steps; on every rank."""
        self._forget()
        if self.runs_ahead and isinstance(self.transport, Distributed):
            self.transport.run_ahead()
        self._calls = 0
        self.transport.open(self._channels)
        shared = self.transport.exchange([steps], "reconnect()")
        ended = [number for (number,) in shared]
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
        if self._in_company:
            with self.agreement.with_replicas(what):
                self.transport.exchange([], what)

    @contextmanager
    def call(self, *, trains: bool, finalizes: bool) -> Iterator[Feed]:
        """One call of step() or eval(): an error inside is reported to the other ranks."""
        self._failed = True
        self._watch.seconds = self.stall_after
        with self._turn, self._watch, ExitStack() as self._end:
            self._calls += 1
            self._feed.clear()
            self._feed.trains, self._feed.finalizes = trains, finalizes
            try:
                yield self._feed
            except TaktlineError as error:
                if error.recoverable != "step" or self.agreement.has_verdict():
                    self._leave(error)
                self._feed.clear()
                raise
            except BaseException as error:  # Ctrl-C, or a wait in a group that is not ours
                if cause := self.agreement.cause(error):
                    self._leave(cause)
                    raise cause from error
                self._leave(error)
                self._note_rank(error)
                raise
            finally:
                self.agreement.end_ahead()
                self._bound = None

    def _note_rank(self, error: BaseException) -> None:
        """Add to an error which of several ranks in this process raised it."""
        current = None if self._watch.program is None else self._watch.program.current
        if len(self.ranks) > 1 and current is not None:
            rank = self.runnable.plan.placement.rank_of[current.running.stage]
            error.add_note(f"on rank {rank} of {counted(len(self.ranks), 'local rank')}")

    def _leave(self, error: BaseException) -> None:
        """Leave a step that other ranks may be in, after reporting why to them."""
        if isinstance(self.transport, Distributed):
            self.transport.raised(error, self._watch.where())
            self.transport.entangle(error)
        self._forget()

    def _forget(self) -> None:
        """Drop the running step after a failure, and all that may be wrong because of it."""
        self._feed.clear()
        self._known.clear()
        self._repeatable = None
        if self._captures is not None:
            self._captures.forget()
        for stage in self._stages:
            stage.clear()

    def check(self) -> None:
        """Raise if a stage does not fit: all checks before the first step, ties before each."""
        count = self.runnable.plan.stages
        if not self._identity.number:
            for stage in self._stages:
                if stage.num_stages != count:
                    raise MismatchError(
                        f"stage {stage.stage_index} is one of {stage.num_stages} (num_stages), but "
                        f"the plan has {counted(count, 'stage')}; make them equal"
                    )
            self.replicas.check(self.transport)
            self._blueprint = whole_model(self._stages)
        if not self._identity.number or self._ties.uses:
            self._ties.check()
        if not self._feed.finalizes and self._ties.uses and self.replicas.shards:
            raise MismatchError(
                "finalize_gradients=False leaves gradients of sharded stages unreduced, but "
                "tied weights need them; use accumulate()"
            )
        self._flags = [_autocast(self.device), *(str(stage.begin()) for stage in self._stages)]

    @property
    def _call(self) -> str:
        """The running call, in words."""
        if not self._feed.trains:
            return "eval()"
        return "step()" if self._feed.finalizes else "step(finalize_gradients=False)"

    def agree(
        self, record: Record, data: Sequence[Any], error: Exception | None
    ) -> tuple[int, ...]:
        """Raise unless all ranks are about to do the same.

        Args:
            record: what the batch says of this call.
            data: the arguments and targets that ranks compare.
            error: why this rank cannot begin.

        Returns the kind of step: mode, micro-batches and inputs of all ranks.
        """
        self._watch.doing = "waits for every rank to begin the step"
        waiting, place = self._identity.waiting(self.transport)
        call, compared, arguments, targets = 0, 0, 0, 0
        if isinstance(self.transport, Distributed):
            # Not on local ranks: they get the same objects, and Ctrl-C may skip calls of some.
            call = self._calls
            compared, arguments, targets = self._data.fingerprints(call, *data)
        self._record = record._replace(
            failed=int(error is not None),
            schedule=self._identity.number,
            waiting=waiting,
            place=place,
            call=call,
            step=self._feed.number,
            plan=0 if error is not None else self.runnable.fingerprint,
            shares=self._feed.shares,
            traces=self.recorder is not None,
            inputs=digest_of([str(record.inputs), *self._flags]),
            compared=compared,
            arguments=arguments,
            targets=targets,
        )
        with self.agreement.with_replicas(self._call):
            if error is not None:
                return self._exchange(self.agreement.located(error))
            return self._ahead() or self._exchange()

    def _ahead(self) -> tuple[int, ...] | None:
        """Begin a step without an exchange: returns its kind; None if the ranks have to agree."""
        if not isinstance(self.transport, Distributed) or self.transport.posts is None:
            return None
        posts, number, known = self.transport.posts, self._identity.number, self._repeatable
        same, posts.schedule = posts.schedule == number, number
        # In a traced step the ranks compare their clocks.
        if known is None or not same or not self._feed.trains or self._record.traces:
            return None
        if self._record.kind != known.record.kind or known.kind not in self._known:
            return None
        self.agreement.begin_ahead(posts)
        self._feed.rows, self._feed.microbatches = known.rows, self._parts(known.rows)
        return known.kind

    def _exchange(self, error: TaktlineError | None = None) -> tuple[int, ...]:
        """Compare the records of all ranks; returns the kind of step."""
        try:
            records = self.agreement.share(self._record, self._call)
        except MismatchError:
            self._calls -= 1  # other ranks are in another call, so this one does not count
            raise
        self.agreement.require_all(records, error)
        if reason := difference(WHICH_STEP, records):
            raise MismatchError(reason)
        if not self._identity.number:
            self._introduce()
        if reason := other_kind(records):
            raise MismatchError(reason)
        rows = max(record.batch for record in records)
        self._feed.rows, self._feed.microbatches = rows, self._parts(rows)
        kind = (self._feed.trains, self._feed.microbatches, *(each.inputs for each in records))
        if self._feed.trains and self.runs_ahead:
            self._repeatable = repeatable(records, self.transport.rank, kind)
            if self._repeatable is None and not self._warned:
                self._warned = True
                warn_of_no_effect(records)
        return kind

    def _introduce(self) -> None:
        """Before the first step: compare the parts of all ranks, and open the channels."""
        rank_of = self.runnable.plan.placement.rank_of
        ranks = introduce(self.transport, self._introduction(), self._blueprint)
        # The same plan on every rank, though only some of them may hold wrapped stages.
        self._reduces = any(rank.reduces for rank in ranks)
        self.runnable = self.runnable.with_wrapped(
            shards=any(rank.shards for rank in ranks), reduces=self._reduces
        )
        if len({rank.in_company for rank in ranks}) > 1:
            self.replicas.pipeline = self.transport
        self._in_company = any(rank.in_company for rank in ranks)
        if isinstance(self.transport, Distributed):
            self.transport.plane.entangled |= self._in_company
            if self.runs_ahead:
                self._begin_ahead(self.transport)
        channels = self._ties.find_holders([rank.ties for rank in ranks])
        if self._random is None:
            channels |= set(channels_of(self.runnable.plan))
        self._channels = sorted(channels)
        self.transport.open(self._channels)
        if self.transport.size == 1 and self._drawing is None:
            self._drawing = Drawing(self.device)
        self._ties.begin(self.transport, rank_of)
        if self.transport.size > 1 and not _on_host(self.device):
            self.agreement.relay = LossRelay(self.transport, rank_of, self.device)
        self._identity.adopt(ranks[0].number)

    def _introduction(self) -> dict[str, Any]:
        """What this rank says of itself before the first step."""
        plan, stages = self.runnable.plan, self._stages
        return {
            "schedule": self._name,
            "microbatches": self._microbatches,
            "num_stages": plan.stages,
            "stages": [stage.stage_index for stage in stages],
            "rank_of": [rank // len(self.ranks) for rank in plan.placement.rank_of],
            "plan": plan.digest(),
            "trains": self._loss_fn is not None,
            "dynamic_shapes": self._dynamic_shapes,
            "run_ahead": self.runs_ahead,
            "shards": self.replicas.shards,
            "reduces": self.replicas.reduces,
            "in_company": self.replicas.in_company,
            "takes": examples({stage.stage_index: stage.expected_input for stage in stages}),
            "gives": examples({stage.stage_index: stage.expected_output for stage in stages}),
            "ties": [asdict(use) for use in self._ties.uses],
            "model": digest(self._blueprint),
            "number": self._identity.proposed(),
        }

    def _begin_ahead(self, transport: Distributed) -> None:
        """Let ranks post what they did, for steps without an exchange."""
        if self._in_company:
            raise MismatchError(
                "run_ahead works for one pipeline whose stages are each on one rank; here replicas "
                "or tensor-parallel ranks share the work of stages, so leave it out"
            )
        if self._dynamic_shapes:
            raise MismatchError("run_ahead needs shapes that are known; leave out dynamic_shapes")
        transport.run_ahead()

    def compute(self, kind: tuple[int, ...], failure: Failure | None) -> Failure | None:
        """Run the program of a kind of step; returns its failure.

        After a failure, run nothing, but take part, so that the other ranks hear of it.
        """
        feed, watch, known = self._feed, self._watch, self._known.pop(kind, None)
        bound = known if isinstance(known, Bound) else self._bind(known, feed.trains)
        self._kind, self._bound, self._learns = kind, bound, known is None
        self._end.enter_context(self._ties.step(trains=feed.trains))
        # Buffers outlive the step, so they must not be made in inference mode.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(feed.trains),
            torch.autograd.set_multithreading_enabled(False),
            self.replicas.step(finalizes=feed.finalizes),
            nullcontext() if self._drawing is None else self._drawing.step(),
            watching(self.recorder, bound, self.transport) as wrap,
        ):
            watch.program = bound.program
            if failure is not None:
                bound.program.forgo(self.agreement.judge)
            elif self._captures is None or wrap is not None:
                failure = bound.program.run(wrap, self.agreement.judge)
            else:
                eagerly = partial(bound.program.run, wrap, self.agreement.judge)
                failure = self._captures.run(kind, bound, eagerly, self._ties.fresh)
        watch.program, watch.doing = None, "waits for the gradients of tied weights"
        failure = self._ties.add_up(failure)
        watch.doing = "waits for every rank to end the step"
        return failure

    def conclude(self, failure: Failure | None) -> None:
        """Agree on the outcome of the running step with the other ranks, and share losses."""
        bound, routes = self._bound, {}
        assert bound is not None
        if self.agreement.posts is not None:
            self.agreement.require_exchange(failure)
            self.agreement.post(self._record)
            bound.program.settle()
        else:
            got = {index: sorted(work.got) for index, work in bound.works.items() if work.got}
            mine = self._record._replace(skips=int(bool(got)))
            skips = self._concluded(mine, failure, "the end of a step")
            bound.program.settle()
            routes = self.agreement.routes(got) if skips else {}
        if self.recorder is not None:
            self.recorder.keep()
        if not self._dynamic_shapes:
            known = bound.learned().along(routes) if self._learns else bound
            self._remember(self._kind, known)
        self._failed = False
        if self._feed.trains:
            self.stepped_at, self.unreduced = updates.now(), self._ties.accumulating

    def _concluded(self, record: Record, failure: Failure | None, what: str) -> bool:
        try:
            return self.agreement.conclude(record, failure, what)
        except TaktlineError:
            self._forget()
            raise

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
                    with suppress(TaktlineError):  # the other ranks are in another call
                        self._end_accumulating(raised)
                raise
            self._accumulate(outer)
            self._end_accumulating()

    def _accumulate(self, accumulating: bool) -> None:
        self._ties.accumulating = accumulating
        self.unreduced = self.unreduced and accumulating
        self.replicas.accumulate(accumulating)

    def _end_accumulating(self, raised: Exception | None = None) -> None:
        """Reduce gradients over the ranks; an error of one rank is raised on all."""
        if self._ties.accumulating or not (self._ties.there or self._reduces):
            return
        self._feed.clear()  # there are no losses to share
        failure, what = None, "the end of accumulate()"
        if raised is not None:
            reason = "has left accumulate() by an error, so nothing was added up"
            kind = type(raised).__name__
            failure = Failure(
                MismatchError(f"rank {self.transport.rank} {reason}: {kind}: {text_of(raised)}")
            )
        # Before any collective: a rank in another step would not answer.
        self._concluded(Record(), failure, what)
        with guarded(self.transport, what):
            self.replicas.catch_up()
        if self._ties.there:
            self._concluded(Record(), self._ties.add_up(None), what)

    def _bind(self, known: Signatures | None, trains: bool) -> Bound:
        return bind(self._binding(trains), known)

    def _remember(self, agreed: tuple[int, ...], known: Signatures | Bound) -> None:
        # Put last, so that the first one is always the longest unused.
        self._known[agreed] = known
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

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
            drawing=self._drawing,
            check_finite=self.check_finite,
        )


def _autocast(device: torch.device) -> str:
    """The types of autocast, which decide what crosses boundaries."""
    kinds = dict.fromkeys(("cpu", device.type))
    return str([torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)])


def _on_host(device: torch.device) -> bool:
    """Whether results on a device can be read without a wait."""
    return device.type == "cpu"
