"""One schedule in one process: agrees with the others, learns what crosses boundaries, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any

import torch

from taktline.errors import MismatchError, StageError, TaktlineError, text_of
from taktline.plan import Plan
from taktline.runtime.accord import Accord
from taktline.runtime.agreement import Call, mismatch, out_of_step
from taktline.runtime.bind import Binding, Bound, Signatures, bind, channels_of
from taktline.runtime.capture import Captures, CudaGraphs, Graphs
from taktline.runtime.digest import digest_of
from taktline.runtime.executor import Failure, Program
from taktline.runtime.fingerprint import DataWatch
from taktline.runtime.identity import Identity
from taktline.runtime.introduction import Introduction, check_stages, examples, misfit
from taktline.runtime.kept import Kept
from taktline.runtime.plans import Runnable
from taktline.runtime.recorder import Recorder, watching
from taktline.runtime.relay import Relay
from taktline.runtime.replicas import Replicas
from taktline.runtime.step_data import Facts, Feed
from taktline.runtime.tie_gradients import Ties
from taktline.runtime.together import Drawing, RankRandom
from taktline.runtime.watchdog import STALL_SECONDS, Watch, guarded
from taktline.stage import PipelineStage
from taktline.text import by_rank, counted
from taktline.transport import Channel, Transport, transport_of
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import share_texts
from taktline.transport.one_rank import Alone
from taktline.transport.turn import Turn

__all__ = ["Finish", "Fit", "Prepare", "Runner"]


Prepare = Callable[[Feed], Facts]
Fit = Callable[[Feed], None]
Finish = Callable[[Feed], Any]

_END = "the end of a step"


class Runner:
    """Runs the steps of one schedule on this rank, or on all ranks if they are in this process."""

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
    ) -> None:
        """``parts`` is into how many micro-batches a batch with so many rows is cut."""
        self._name = name
        self._turn = Turn(name)
        self._make_plan = make_plan
        self._stages = list(stages)
        self._microbatches = microbatches
        self._loss_fn = loss_fn
        self._parts = parts
        self._seed = seed
        self._dynamic_shapes = dynamic_shapes
        self._kept = Kept(self._stages)
        self._feed = self._kept.feed
        self.replicas = Replicas(self._stages)
        self._ties = Ties(self._stages)
        self._reduces = self._entangled = False
        """Whether a stage of any rank averages its gradients, or shares its work in any way."""
        self.recorder: Recorder | None = None
        """What notes the steps, while there is a trace."""
        self._random: RankRandom | None = None
        """Those of all ranks, where they run in this process."""
        self._drawing: Drawing | None = None
        """The same, or what looks whether a lone rank draws."""
        self._transport: Transport | None = None
        self._watch: Watch | None = None
        self.stall_after: float | None = STALL_SECONDS
        self._runnable: Runnable | None = None
        self._identity = Identity(self._stages[0].group)
        self._calls = 0
        self._channels: list[Channel] = []
        self._failed = False
        """Whether the latest call has raised: then all ranks know."""
        self._data = DataWatch()

    def run_all_ranks(self, count: int) -> None:
        """Run all ranks of the plan in one thread, where they hand over what they would send."""
        self._random = self._drawing = RankRandom(count, self.device)
        self._transport = Alone()

    def capture(self, graphs: Graphs | None = None) -> None:
        """Capture programs as CUDA graphs, or as what ``graphs`` makes, and replay them."""
        self._kept.captures = Captures(
            graphs or CudaGraphs(self.device), self._stages, dynamic_shapes=self._dynamic_shapes
        )

    @property
    def captured(self) -> str:
        """Which programs are captured; nothing if none are to be."""
        return "" if self._kept.captures is None else str(self._kept.captures)

    @property
    def ranks(self) -> range:
        """Those that run here."""
        if self._random is not None:
            return range(self._random.ranks)
        return range(self.transport.rank, self.transport.rank + 1)

    @property
    def transport(self) -> Transport:
        """How this rank talks to the others."""
        if self._transport is None:
            stage = self._stages[0]
            self._transport = transport_of(stage.group, stage.device)
        return self._transport

    @cached_property
    def accord(self) -> Accord:
        """What this rank agrees on with the others."""
        return Accord(self.transport, self.replicas, self._kept)

    @property
    def watch(self) -> Watch:
        """What looks after the steps."""
        if self._watch is None:
            transport = self.transport if isinstance(self.transport, Distributed) else None
            self._watch = Watch(self._name, transport)
        self._watch.seconds = self.stall_after
        return self._watch

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._stages[0].device

    @property
    def runnable(self) -> Runnable:
        """The plan, for training and for evaluation."""
        if self._runnable is None:
            self._runnable = Runnable(self._make_plan(self.transport.size * len(self.ranks)))
        return self._runnable

    def run(self, prepare: Prepare, fit: Fit, finish: Finish, *, trains: bool) -> tuple[Any, Feed]:
        """One step: its output, and the feed with its losses. Every rank raises the same error.

        Args:
            prepare: fills the feed with what this rank knows by itself.
            fit: fills in what depends on the rows of the batch, once all ranks know them.
            finish: makes one output of those of the micro-batches.
            trains: whether there is a backward.
        """
        self._failed = True
        with self._turn, self.watch as watch:
            self._calls += 1
            try:
                return self._step(prepare, fit, finish, watch, trains)
            except TaktlineError as error:
                if error.recoverable != "step" or self._has_verdict():
                    self._leave(error, watch)
                raise
            except BaseException as error:  # Ctrl-C, or a wait in a group that is not ours
                if isinstance(self.transport, Distributed) and (
                    cause := self.transport.explain(error)
                ):
                    self._leave(cause, watch)
                    raise cause from error
                self._leave(error, watch)
                self._note_rank(error, watch.program)
                raise

    def _note_rank(self, error: BaseException, program: Program | None) -> None:
        """Say which of several ranks in this process an error comes from."""
        current = None if program is None else program.current
        if len(self.ranks) > 1 and current is not None:
            rank = self.runnable.plan.placement.rank_of[current.running.stage]
            error.add_note(f"on rank {rank} of {counted(len(self.ranks), 'local rank')}")

    def _has_verdict(self) -> bool:
        return isinstance(self.transport, Distributed) and self.transport.verdict is not None

    def judge(self, error: Exception, told: StageError | None) -> None:
        """Raise if the ranks cannot go on: the error is another's, or of work that they share."""
        if not isinstance(self.transport, Distributed):
            return
        if (cause := self.transport.explain(error)) is not None:
            raise cause from error
        if told is not None and self.replicas.computes_together(told.stage):
            # Those who compute with this rank wait for it in the middle of an action.
            self.transport.raised(told)
            raise told

    def _leave(self, error: BaseException, watch: Watch) -> None:
        """This rank leaves a step that others may be in: they have to know why, and first."""
        if isinstance(self.transport, Distributed):
            self.transport.raised(error, watch.where())
            self.transport.entangle(error)
        self._kept.forget()

    def connect(self) -> None:
        """Open the channels before the first step, which would wait for that; every rank calls it.

        If their plans differ, the first step says so.
        """
        if isinstance(self.transport, Distributed) and self.transport.size > 1:
            plans = self.transport.exchange([self.runnable.fingerprint], "Pipeline(…)")
            if all(plan == plans[0] for plan in plans):
                self._channels = sorted(channels_of(self.runnable.plan))
                self.transport.open(self._channels)

    def restart(self, steps: int) -> None:
        """Begin anew, over new connections, after so many training steps."""
        self._kept.forget()
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

    def _step(
        self, prepare: Prepare, fit: Fit, finish: Finish, watch: Watch, trains: bool
    ) -> tuple[Any, Feed]:
        self._feed.clear()
        watch.doing = "waits for every rank to begin the step"
        with self.accord.with_replicas(_call(trains)):
            shares, agreed = self._agree(prepare, trains)
        known = self._kept.take(agreed)
        bound = known if isinstance(known, Bound) else self._bind(known, trains)
        failure = self._fitted(fit)
        with self._ties.step(trains=trains):
            output, skips = self._compute(
                bound, agreed, failure, finish, watch, shares=shares, trains=trains
            )
        if self.recorder is not None:
            self.recorder.keep()
        if not self._dynamic_shapes:
            known = bound.learned().along(skips) if known is None else bound
            self._remember(agreed, known)
        self._failed = False
        return output, self._feed

    def _compute(
        self,
        bound: Bound,
        agreed: tuple[int, ...],
        failure: Failure | None,
        finish: Finish,
        watch: Watch,
        *,
        shares: bool,
        trains: bool,
    ) -> tuple[Any, dict[str, int]]:
        """Run the program: its output, and the routes of skips, agreed on by all ranks.

        After a failure, run nothing, but take part, so that the other ranks hear of it.
        """
        # Buffers outlive the step, so they must not be made in inference mode.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(trains),
            torch.autograd.set_multithreading_enabled(False),
            self.replicas.step(),
            nullcontext() if self._drawing is None else self._drawing.step(),
            watching(self.recorder, bound, self.transport) as wrap,
        ):
            watch.program = bound.program
            if failure is None:
                eagerly = partial(bound.program.run, wrap, self)
                if self._kept.captures is None or wrap is not None:
                    failure = eagerly()
                else:
                    failure = self._kept.captures.run(agreed, bound, eagerly, self._ties.apart)
            else:
                bound.program.forgo(self)
        watch.program, watch.doing = None, "waits for the gradients of tied weights"
        failure = self._ties.add_up(failure)
        watch.doing = "waits for every rank to end the step"
        output = None
        if failure is None:
            try:
                output = finish(self._feed)
            except Exception as raised:
                failure = Failure(self.accord.told(raised))
        got = {index: sorted(work.got) for index, work in bound.works.items() if work.got}
        skips = self.accord.conclude(failure, _END, skips=bool(got), shares=shares)
        bound.program.settle()
        return output, self.accord.routes(got) if skips else {}

    def _fitted(self, fit: Fit) -> Failure | None:
        """Fill in what depends on the batch; what goes wrong, all ranks hear of in the end."""
        try:
            fit(self._feed)
        except Exception as raised:
            return Failure(self.accord.told(raised))
        return None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, gradients stay where they are; at its end they meet those of other ranks."""
        with self._ties.step(trains=False):
            try:
                with self._ties.accumulate(), self.replicas.accumulate():
                    yield
            except Exception as raised:
                if not self._failed:
                    with suppress(TaktlineError):  # the others are elsewhere, and are told so
                        self._end_accumulating(raised)
                raise
            self._end_accumulating()

    def _end_accumulating(self, raised: Exception | None = None) -> None:
        """Let gradients meet those of other ranks; all hear of what went wrong on one."""
        if self._ties.accumulating or not (self._ties.there or self._reduces):
            return
        failure, what = None, "the end of accumulate()"
        if raised is not None:
            story = "has left accumulate() by an error, so nothing was added up"
            kind = type(raised).__name__
            failure = Failure(
                MismatchError(f"rank {self.transport.rank} {story}: {kind}: {text_of(raised)}")
            )
        # First that all are here: nobody answers from within another step.
        self.accord.conclude(failure, what)
        with guarded(self.transport, what):
            self.replicas.catch_up()
        if self._ties.there:
            self.accord.conclude(self._ties.add_up(None), what)

    def arrive(self, what: str) -> None:
        """Raise unless every rank is in the same call, which may wait in collectives.

        If a rank shares its work with no other pipeline, it waits in none but ours, which see it.
        """
        if self._entangled:
            with self.accord.with_replicas(what):
                self.transport.exchange([], what)

    def _agree(self, prepare: Prepare, trains: bool) -> tuple[bool, tuple[int, ...]]:
        """Make sure that all ranks are about to do the same.

        Returns whether every rank shall have the losses, and what the inputs of all look like.
        """
        error, plan, facts, flags = None, 0, Facts(), []
        try:
            plan = self.runnable.fingerprint
            if not self._identity.number:
                check_stages(self._stages, self.runnable.plan)
                self.replicas.check(self.transport)
            if not self._identity.number or self._ties.uses:
                self._ties.check()
            facts = prepare(self._feed)
            flags = [str(stage.begin()) for stage in self._stages]
        except Exception as raised:
            error = self.accord.told(raised)
        waiting, place = self._identity.waiting(self.transport)
        call = Call(
            failed=int(error is not None),
            schedule=self._identity.number,
            waiting=waiting,
            place=place,
            # Local ranks are called together; Ctrl-C may still keep some of them from being called.
            call=self._calls if isinstance(self.transport, Distributed) else 0,
            step=self._feed.number,
            plan=plan,
            batch=facts.size,
            target=facts.target,
            shares=facts.shares,
            traces=self.recorder is not None,
            inputs=digest_of([str(facts.look), _autocast(self.device), *flags]),
            **self._look_at(facts),
        )
        try:
            shared = self.transport.exchange(call, _call(trains))
        except MismatchError:
            self._calls -= 1  # other ranks are in another call, so this one was none
            raise
        calls = [Call.read(numbers, rank) for rank, numbers in enumerate(shared)]
        if any(call.failed for call in calls):
            self.accord.raise_first(error)
        if story := out_of_step(calls):
            raise MismatchError(story)
        if not self._identity.number:
            self._introduce()
        if story := mismatch(calls):
            raise MismatchError(story)
        rows = max(call.batch for call in calls)
        self._feed.rows, self._feed.microbatches = rows, self._parts(rows)
        return facts.shares, (trains, self._feed.microbatches, *(call.inputs for call in calls))

    def _look_at(self, facts: Facts) -> dict[str, int]:
        """What the ranks compare of the data, if they do so in this call."""
        if not isinstance(self.transport, Distributed):
            return {}  # local ranks are given the same objects
        return self._data.look(self._calls, facts.arguments, facts.targets)._asdict()

    def _introduce(self) -> None:
        """Before the first step: compare what each rank brings, and open the channels."""
        mine = Introduction(
            self._name,
            self._microbatches,
            self.runnable.plan.stages,
            [stage.stage_index for stage in self._stages],
            self._places(),
            self.runnable.plan.digest(),
            self._loss_fn is not None,
            self._dynamic_shapes,
            self.replicas.shards,
            self.replicas.reduces,
            self.replicas.entangled,
            examples({stage.stage_index: stage.expected_input for stage in self._stages}),
            examples({stage.stage_index: stage.expected_output for stage in self._stages}),
            [use.to_plain() for use in self._ties.uses],
            self._identity.next_number(),
        )
        texts = share_texts(self.transport, mine.to_text(), "the first step")
        everyone = [Introduction.from_text(text) for text in texts]
        if story := misfit(everyone):
            raise MismatchError(story)
        # The same plan on every rank, though only some of them may hold wrapped stages.
        self._reduces = any(rank.reduces for rank in everyone)
        self._runnable = self.runnable.with_wrapped(
            shards=any(rank.shards for rank in everyone), reduces=self._reduces
        )
        if len({rank.entangled for rank in everyone}) > 1:
            self.replicas.pipeline = self.transport
        self._entangled = any(rank.entangled for rank in everyone)
        if isinstance(self.transport, Distributed) and self.transport.plane is not None:
            self.transport.plane.entangled |= self._entangled
        channels = self._ties.meet([rank.uses for rank in everyone])
        if self._random is None:
            channels |= set(channels_of(self.runnable.plan))
        self._channels = sorted(channels)
        self.transport.open(self._channels)
        if self.transport.size == 1 and self._drawing is None:
            self._drawing = Drawing(self.device)
        rank_of = self.runnable.plan.placement.rank_of
        self._ties.begin(self.transport, rank_of)
        if self.transport.size > 1 and not _on_host(self.device):
            self.accord.relay = Relay(self.transport, rank_of, self.device)
        self._identity.adopt(everyone[0].number)

    def _places(self) -> list[int]:
        """Which process each stage belongs to."""
        rank_of = self.runnable.plan.placement.rank_of
        return [rank // len(self.ranks) for rank in rank_of]

    def _bind(self, known: Signatures | None, trains: bool) -> Bound:
        return bind(self._binding(trains), known)

    def _remember(self, agreed: tuple[int, ...], known: Signatures | Bound) -> None:
        self._kept.keep(agreed, known)

    def _binding(self, trains: bool) -> Binding:
        """What the program of a step is made from."""
        return Binding(
            self.runnable.program(self._feed.microbatches, trains=trains),
            {stage.stage_index: stage for stage in self._stages},
            self.transport,
            self._feed,
            self._loss_fn,
            self._seed,
            trains,
            sends_may_wait=not trains or self.runnable.sends_may_wait,
            drawing=self._drawing,
        )


def _call(trains: bool) -> str:
    return "step()" if trains else "eval()"


def _on_host(device: torch.device) -> bool:
    """Whether what a device computes can be read without waiting."""
    return device.type == "cpu"


def _autocast(device: torch.device) -> str:
    """What autocast makes of a forward; what crosses boundaries depends on it."""
    kinds = dict.fromkeys(("cpu", device.type))
    return str([torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)])
