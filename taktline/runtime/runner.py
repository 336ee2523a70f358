"""Runs the steps of one schedule in one process: agrees with the other ranks, binds, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any

import torch

from taktline.errors import MismatchError, StageError, TaktlineError, text_of
from taktline.runtime import updates
from taktline.runtime.agreement import WHICH_STEP, Record, difference, other_kind
from taktline.runtime.bind import Binding, Bound, bind
from taktline.runtime.capture import Captures, CudaGraphs, Graphs
from taktline.runtime.fingerprint import digest_of
from taktline.runtime.losses import LateLoss, mean_of
from taktline.runtime.pipeline_rank import PipelineRank
from taktline.runtime.ports import Signatures
from taktline.runtime.program import Failure
from taktline.runtime.run_ahead import repeatable, warn_of_no_effect
from taktline.runtime.step_data import Feed
from taktline.runtime.trace import Recorder, watching
from taktline.runtime.watchdog import STALL_SECONDS, Watch, guarded
from taktline.text import counted
from taktline.transport.distributed import Distributed
from taktline.transport.posts import Posts

Prepare = Callable[[Feed], tuple[Record, Any, Any]]
Fit = Callable[[Feed], None]
Finish = Callable[[Feed], Any]

_END = "the end of a step"
_REMEMBERED = 8
"""The most kinds of steps whose programs are kept."""


class Runner(PipelineRank):
    """Runs the steps of one schedule on this rank, or on all ranks if they are in this process."""

    recorder: Recorder | None = None
    """Records the steps, while there is a trace."""
    stall_after: float | None = STALL_SECONDS
    check_finite = False
    _failed = False
    """Whether the latest call has raised: then all ranks know."""
    _record = Record()
    """What this rank says of the running call."""
    _posts: Posts | None = None
    """Where the outcome of the running step is posted, if it has no exchange."""
    _warned = False
    """Whether it was logged that run_ahead has no effect."""
    _usual_loss: torch.Tensor | None = None
    """A loss of the type and on the device of others."""

    def capture(self, graphs: Graphs | None = None) -> None:
        """Capture programs as CUDA graphs, or with ``graphs``, and replay them."""
        self._captures = Captures(
            graphs or CudaGraphs(self.device), self._stages, dynamic_shapes=self._dynamic_shapes
        )

    @property
    def captured(self) -> str:
        """The captured programs, as text; empty without captures."""
        return "" if self._captures is None else str(self._captures)

    @property
    def _call(self) -> str:
        """The running call, in words."""
        if not self._feed.trains:
            return "eval()"
        return "step()" if self._feed.finalizes else "step(finalize_gradients=False)"

    @cached_property
    def _watch(self) -> Watch:
        transport = self.transport if isinstance(self.transport, Distributed) else None
        return Watch(self._name, transport)

    def run(
        self,
        prepare: Prepare,
        fit: Fit,
        finish: Finish,
        *,
        trains: bool,
        finalizes: bool = True,
    ) -> tuple[Any, Feed]:
        """Run one step: returns its output, and the feed with its losses.

        Every rank raises the same error. ``prepare`` fills the feed, and returns what a batch says
        of its call, with the arguments and targets that ranks compare; ``fit`` fills those fields
        that depend on the rows of the batch, once all ranks know them; ``finish`` merges outputs.
        """
        self._failed = True
        self._watch.seconds = self.stall_after
        with self._turn, self._watch:
            self._calls += 1
            self._feed.clear()
            self._feed.trains, self._feed.finalizes = trains, finalizes
            try:
                return self._step(prepare, fit, finish)
            except TaktlineError as error:
                if error.recoverable != "step" or self._has_verdict():
                    self._leave(error)
                self._feed.clear()
                raise
            except BaseException as error:  # Ctrl-C, or a wait in a group that is not ours
                if cause := self._cause(error):
                    self._leave(cause)
                    raise cause from error
                self._leave(error)
                self._note_rank(error)
                raise
            finally:
                if self._posts is not None:
                    self._posts.end()
                    self._posts = None

    def _note_rank(self, error: BaseException) -> None:
        """Add to an error which of several ranks in this process raised it."""
        current = None if self._watch.program is None else self._watch.program.current
        if len(self.ranks) > 1 and current is not None:
            rank = self.runnable.plan.placement.rank_of[current.running.stage]
            error.add_note(f"on rank {rank} of {counted(len(self.ranks), 'local rank')}")

    def _has_verdict(self) -> bool:
        return isinstance(self.transport, Distributed) and self.transport.verdict is not None

    def _cause(self, error: BaseException) -> TaktlineError | None:
        """Why another rank's failure has raised an error here; None if it is this rank's own."""
        return self.transport.explain(error) if isinstance(self.transport, Distributed) else None

    def _judge(self, error: Exception, located: StageError | None) -> None:
        """Raise if the ranks cannot go on: another rank failed, or others compute with this one."""
        if (cause := self._cause(error)) is not None:
            raise cause from error
        if located is None or not isinstance(self.transport, Distributed):
            return
        if self._posts is not None:
            located.recoverable = "reconnect"
            raise located
        # The ranks that compute with this one wait for it in the middle of an action.
        if self.replicas.computes_together(located.stage):
            self.transport.raised(located)
            raise located

    def _leave(self, error: BaseException) -> None:
        """Leave a step that other ranks may be in, after reporting why to them."""
        if isinstance(self.transport, Distributed):
            self.transport.raised(error, self._watch.where())
            self.transport.entangle(error)
        self._forget()

    def _step(self, prepare: Prepare, fit: Fit, finish: Finish) -> tuple[Any, Feed]:
        self._watch.doing = "waits for every rank to begin the step"
        with self.agreement.with_replicas(self._call):
            agreed = self._agree(prepare)
        known = self._known.pop(agreed, None)
        trains = self._feed.trains
        bound = known if isinstance(known, Bound) else self._bind(known, trains)
        _, failure = self._tried(fit)
        with self._ties.step(trains=trains):
            output, skips = self._compute(bound, agreed, failure, finish)
        if self.recorder is not None:
            self.recorder.keep()
        if not self._dynamic_shapes:
            self._remember(agreed, bound.learned().along(skips) if known is None else bound)
        self._failed = False
        if trains:
            self.stepped_at, self.unreduced = updates.now(), self._ties.accumulating
        return output, self._feed

    def _tried(self, call: Callable[[Feed], Any]) -> tuple[Any, Failure | None]:
        """What a call outside of the program returns, or its failure.

        All ranks hear of it at the end of the step; a step without an exchange raises it.
        """
        try:
            return call(self._feed), None
        except Exception as raised:
            failure = Failure(self.agreement.located(raised))
            self._require_alone(failure)
            return None, failure

    def _require_alone(self, failure: Failure | None) -> None:
        """Raise if a step without an exchange has failed: other ranks may have ended it."""
        if failure is not None and self._posts is not None:
            error = failure.error or MismatchError(
                "another rank has failed in this step; look at its output, and call reconnect()"
            )
            error.recoverable = "reconnect"
            raise error

    def _compute(
        self, bound: Bound, agreed: tuple[int, ...], failure: Failure | None, finish: Finish
    ) -> tuple[Any, dict[str, int]]:
        """Run the program: returns its output, and the routes of skips that all ranks agree on.

        After a failure, run nothing, but take part, so that the other ranks hear of it.
        """
        watch = self._watch
        # Buffers outlive the step, so they must not be made in inference mode.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self._feed.trains),
            torch.autograd.set_multithreading_enabled(False),
            self.replicas.step(finalizes=self._feed.finalizes),
            nullcontext() if self._drawing is None else self._drawing.step(),
            watching(self.recorder, bound, self.transport) as wrap,
        ):
            watch.program = bound.program
            if failure is None:
                eagerly = partial(bound.program.run, wrap, self._judge)
                if self._captures is None or wrap is not None:
                    failure = eagerly()
                else:
                    failure = self._captures.run(agreed, bound, eagerly, self._ties.apart)
            else:
                bound.program.forgo(self._judge)
        watch.program, watch.doing = None, "waits for the gradients of tied weights"
        failure = self._ties.add_up(failure)
        watch.doing = "waits for every rank to end the step"
        output = None
        if failure is None:
            output, failure = self._tried(finish)
        if self._posts is not None:
            self._require_alone(failure)
            self.agreement.post(self._posts, self._record)
            bound.program.settle()
            return output, {}
        got = {index: sorted(work.got) for index, work in bound.works.items() if work.got}
        skips = self._conclude(self._record._replace(skips=int(bool(got))), failure, _END)
        bound.program.settle()
        return output, self.agreement.routes(got) if skips else {}

    def _conclude(self, record: Record, failure: Failure | None, what: str) -> bool:
        try:
            return self.agreement.conclude(record, failure, what)
        except TaktlineError:
            self._forget()
            raise

    def mean_loss(self) -> torch.Tensor | None:
        """The mean loss of the latest step; on a rank that does not know it yet, a LateLoss."""
        late, usual = self._feed.late, self._usual_loss
        if late is not None and usual is not None and not self._feed.losses:
            return LateLoss.like(usual, partial(_late_mean, late))
        self._usual_loss = mean_of(self._feed.losses, self._feed.scales)
        return self._usual_loss

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
        self._conclude(Record(), failure, what)
        with guarded(self.transport, what):
            self.replicas.catch_up()
        if self._ties.there:
            self._conclude(Record(), self._ties.add_up(None), what)

    def _agree(self, prepare: Prepare) -> tuple[int, ...]:
        """Raise unless all ranks are about to do the same.

        Returns the kind of step: mode, micro-batches and inputs of all ranks.
        """
        error, plan, record, data, flags = None, 0, Record(), (None, None), []
        try:
            plan = self.runnable.fingerprint
            self._check()
            record, *data = prepare(self._feed)
            if not self._feed.finalizes and self._ties.uses and self.replicas.shards:
                raise MismatchError(
                    "finalize_gradients=False leaves gradients of sharded stages unreduced, but "
                    "tied weights need them; use accumulate()"
                )
            flags = [str(stage.begin()) for stage in self._stages]
        except Exception as raised:
            error = self.agreement.located(raised)
        compared, arguments, targets = 0, 0, 0
        if isinstance(self.transport, Distributed):
            # Not on local ranks: they get the same objects, and Ctrl-C may skip calls of some.
            compared, arguments, targets = self._data.fingerprints(self._calls, *data)
        waiting, place = self._identity.waiting(self.transport)
        self._record = record._replace(
            failed=int(error is not None),
            schedule=self._identity.number,
            waiting=waiting,
            place=place,
            call=self._calls if isinstance(self.transport, Distributed) else 0,
            step=self._feed.number,
            plan=plan,
            shares=self._feed.shares,
            traces=self.recorder is not None,
            inputs=digest_of([str(record.inputs), _autocast(self.device), *flags]),
            compared=compared,
            arguments=arguments,
            targets=targets,
        )
        ahead = None if error is not None else self._ahead(self._record)
        return ahead or self._exchange(self._record, error)

    def _ahead(self, record: Record) -> tuple[int, ...] | None:
        """Begin a step without an exchange: returns its kind; None if the ranks have to agree."""
        if not isinstance(self.transport, Distributed) or self.transport.posts is None:
            return None
        posts, number, known = self.transport.posts, self._identity.number, self._repeatable
        same, posts.schedule = posts.schedule == number, number
        # In a traced step the ranks compare their clocks.
        if known is None or not same or not self._feed.trains or record.traces:
            return None
        if record.kind != known.record.kind or known.kind not in self._known:
            return None
        self._posts = posts
        posts.begin()
        self._feed.rows, self._feed.microbatches = known.rows, self._parts(known.rows)
        return known.kind

    def _exchange(self, record: Record, error: TaktlineError | None) -> tuple[int, ...]:
        """Compare the records of all ranks; returns the kind of step."""
        try:
            records = self.agreement.share(record, self._call)
        except MismatchError:
            self._calls -= 1  # other ranks are in another call, so this one does not count
            raise
        self.agreement.require_all(records, error)
        if reason := difference(WHICH_STEP, records):
            raise MismatchError(reason)
        if not self._identity.number:
            self._shake_hands()
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


def _late_mean(late: Callable[[Feed], None]) -> torch.Tensor | None:
    """The mean of the losses of all ranks; waits for them."""
    feed = Feed()
    late(feed)
    return mean_of(feed.losses, feed.scales)
