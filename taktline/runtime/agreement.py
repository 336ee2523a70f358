"""Agreement among the ranks of a pipeline: on each call of step() and eval(), and its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, NoReturn
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from taktline.errors import BatchError, MismatchError, TaktlineError, text_of
from taktline.runtime.outcome import LossRelay, Outcome, RelayedLosses
from taktline.runtime.program import Failure
from taktline.runtime.replicas import Replicas
from taktline.runtime.step_data import Feed
from taktline.text import by_rank, counted
from taktline.transport import Transport, local
from taktline.transport.communicators import default_group
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import retold, share_error, share_values
from taktline.transport.posts import Post, Posts


class Call(NamedTuple):
    """One rank's call of step() or eval(), as numbers."""

    failed: int = 0
    """1 if the rank could not begin."""
    schedule: int = 0
    """The number that the ranks have agreed on for the schedule; 0 before its first step."""
    waiting: int = 0
    """How many schedules of these ranks wait for their first step."""
    place: int = 0
    """The place of this schedule among the waiting ones, in the order in which they were made."""
    call: int = 0
    """Which call of this schedule's step() and eval() it is."""
    step: int = 0
    """The number of training steps so far."""
    plan: int = 0
    batch: int = 0
    """The size of the batch along its micro-batches, 0 if this rank got none."""
    target: int = 0
    """The same for the target, unless it has a chunk spec of its own."""
    shares: int = 0
    """Whether every rank gets the losses."""
    traces: int = 0
    """Whether a trace is being recorded."""
    inputs: int = 0
    """A digest of the shapes and types of the arguments."""
    compared: int = 0
    """The call whose data the fingerprints describe; 0 for none."""
    arguments: int = 0
    """The fingerprint of the data in the arguments; 0 if the rank got none."""
    targets: int = 0
    """The fingerprint of the target."""
    whole: int = 0
    """A digest of the whole batch, with the target; 0 if this rank did not get it."""

    @property
    def kind(self) -> tuple[int, ...]:
        """The numbers on which the messages of a step depend."""
        made = (self.schedule, self.plan, self.batch, self.target)
        return (*made, self.shares, self.traces, self.inputs, self.whole)

    @classmethod
    def read(cls, numbers: Sequence[int], rank: int) -> Call:
        """A call from the numbers that a rank has sent."""
        if len(numbers) != len(cls._fields):
            raise MismatchError(
                f"rank {rank} runs another version of Taktline; install the same on every rank"
            )
        return cls(*numbers)


def mismatch(calls: Sequence[Call]) -> str | None:
    """Why these calls cannot be one step; None if they can."""
    if len(calls) > 1 and (reason := _disagreement(calls)):
        return reason
    batch = max(call.batch for call in calls)
    for rank, call in enumerate(calls):
        # Not always equal: a target may have one entry a token.
        if batch and call.target % batch:
            return (
                f"the batch has {counted(batch, 'row')}, but the target on rank {rank} has "
                f"{call.target}; pass arguments and target of one batch, with as many entries for "
                "each row, or say with target_chunk_spec=… how the target is cut by itself"
            )
    return None if len(calls) == 1 else _different_data(calls)


def _disagreement(calls: Sequence[Call]) -> str | None:
    if reason := differs("value of share_losses", [bool(call.shares) for call in calls]):
        return f"{reason}; pass the same on every rank"
    if reason := differs("use of trace()", [bool(call.traces) for call in calls]):
        return f"{reason}; enter and leave it on every rank at the same place"
    if len({call.plan for call in calls}) > 1:
        groups = by_rank([f"{call.plan:015x}"[:8] for call in calls])
        return f"the ranks run different plans: {groups}; step the same schedule on every rank"
    batches = {rank: call.batch for rank, call in enumerate(calls) if call.batch}
    if len(set(batches.values())) > 1:
        sizes = ", ".join(f"{size} on rank {rank}" for rank, size in batches.items())
        return f"the batch has different sizes: {sizes}; pass every rank its part of one batch"
    return None


def out_of_step(calls: Sequence[Call]) -> str | None:
    """Why the ranks are not in the same call of the same schedule; None if they are."""
    if len(calls) == 1:
        return None
    if len({call.schedule for call in calls}) > 1:
        names = [f"number {call.schedule}" if call.schedule else "a new one" for call in calls]
        return (
            f"the ranks step different schedules: {by_rank(names)}, counted by their first steps; "
            "step the same schedules in the same order on every rank"
        )
    if len({call.waiting for call in calls}) == 1 and len({call.place for call in calls}) > 1:
        names = [f"number {call.place + 1} of {call.waiting}" for call in calls]
        return (
            f"the ranks begin with different schedules: {by_rank(names)} that were made and not "
            "stepped yet; make and step the schedules in the same order on every rank"
        )
    if len({call.call for call in calls}) > 1:
        numbers = by_rank([f"number {call.call}" for call in calls])
        return (
            f"the ranks are in different calls of step() and eval(): {numbers}; a rank has left "
            "one out, or made one more. Make the same calls on every rank"
        )
    if reason := differs("number of training steps so far", [call.step for call in calls]):
        return f"{reason}; set steps on every rank when you resume"
    return None


def _different_data(calls: Sequence[Call]) -> str | None:
    """Which ranks were given other data than most."""
    latest = max(call.compared for call in calls)
    now = calls[0].call
    for what in ("arguments", "targets"):
        found = {
            rank: getattr(call, what)
            for rank, call in enumerate(calls)
            if call.compared == latest and getattr(call, what)
        }
        if len(set(found.values())) > 1:
            ((most, _),) = Counter(found.values()).most_common(1)  # the first of several
            one = next(rank for rank, data in found.items() if data == most)
            other = next(rank for rank, data in found.items() if data != most)
            when = "" if latest == now else f" in call {latest} (this is call {now})"
            return (
                f"the ranks were given different {what}{when}: those of rank {other} are not those "
                f"of rank {one}, so inputs would meet the targets of other samples. Pass "
                "every rank of a pipeline the same batch: draw it from a generator of its own, "
                "or read it on one rank and hand it on with pipe.loader(…)"
            )
    return None


def differs(noun: str, values: Sequence[object]) -> str | None:
    """The values that ranks disagree on, in words; None if all are the same."""
    if len(set(values)) == 1:
        return None
    return f"the ranks disagree on the {noun}: {by_rank(values)}"


class ScheduleNumber:
    """The number that the ranks agree on for a schedule in its first step.

    Before, a rank knows a schedule only by its place among those that it has made for ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.number = 0
        """0 before the first step."""
        self.maker = local.current()
        if self.maker is None and group is None and dist.is_available() and dist.is_initialized():
            group = default_group()
        ranks = self.maker or group
        self._made = _Made() if ranks is None else _made.setdefault(ranks, _Made())
        self._made.waiting.append(ref(self))

    def waiting(self, transport: Transport) -> tuple[int, int]:
        """How many schedules wait for their first step, and the place of this one among them."""
        here = None if isinstance(transport, Distributed) else transport
        waiting = [each for known in self._made.waiting if (each := known()) is not None]
        # Local ranks whose schedules were all made in one place have no places of their own.
        if self.number or self.maker is not here:
            return 0, 0
        return len(waiting), waiting.index(self)

    def proposed(self) -> int:
        """The next number on this rank."""
        return self._made.numbered + 1

    def adopt(self, number: int) -> None:
        """Take the number that the ranks have agreed on."""
        self.number = self._made.numbered = number
        self._made.waiting = [each for each in self._made.waiting if each() not in (None, self)]


class _Made:
    """The schedules that this rank has made for the same ranks."""

    def __init__(self) -> None:
        self.waiting: list[ref[ScheduleNumber]] = []
        self.numbered = 0


_made: WeakKeyDictionary[object, _Made] = WeakKeyDictionary()


class Agreement:
    """Raises the same error on all ranks of a pipeline and its replicas, and shares losses.

    ``forget`` is called if a step fails.
    """

    def __init__(
        self, transport: Transport, replicas: Replicas, feed: Feed, forget: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._replicas = replicas
        self._feed = feed
        self._forget = forget
        self.relay: LossRelay | None = None
        """Carries losses to the other ranks where reading them would wait for a GPU."""
        self.asks_to_stop: Callable[[], bool] | None = None
        """Whether this rank shall end after the running step."""
        self.preempted = False
        """Whether any rank asked to stop in the latest step whose outcome is known."""

    @contextmanager
    def with_replicas(self, what: str) -> Iterator[None]:
        """An error raised inside in one replica is raised at the end of the block in all."""
        try:
            yield
        except TaktlineError as raised:
            raise self._replicas.agree(raised, what) or raised from raised.__cause__
        if (elsewhere := self._replicas.agree(None, what)) is not None:
            self._forget()
            raise elsewhere

    def conclude(self, failure: Failure | None, what: str, *, skips: bool = False) -> bool:
        """Agree on the outcome, and on shared losses; returns whether any rank has skips."""
        with self.with_replicas(what):
            outcomes = self._exchanged(failure, what, skips)
            self.preempted = any(outcome.preempted for outcome in outcomes)
            if any(outcome.failed for outcome in outcomes):
                self._forget()
                self.raise_first(None if failure is None else failure.error)
        return any(outcome.skips for outcome in outcomes)

    def post(self, posts: Posts, call: Call) -> None:
        """Post the outcome of a step that has worked here, without waiting for other ranks."""
        feed, relayed = self._feed, None
        if feed.shares and self.relay is not None:
            relayed = self.relay.share_aside(feed.losses, feed.microbatches)
        mine = self._mine(None, skips=False, shares=feed.shares, relayed=relayed is not None)
        post = posts.post([*call, *mine.numbers], self._check_post)
        if feed.shares:
            feed.late = partial(_share_late, post, relayed)

    def _check_post(self, rows: Sequence[Sequence[int]]) -> None:
        """Raise if the ranks were in different steps."""
        calls = [Call.read(row[: len(Call._fields)], rank) for rank, row in enumerate(rows)]
        if reason := out_of_step(calls) or mismatch(calls):
            raise MismatchError(f"an earlier step: {reason}")
        self.preempted |= any(outcome.preempted for outcome in _outcomes(rows))

    def _mine(
        self, failure: Failure | None, *, skips: bool, shares: bool, relayed: bool
    ) -> Outcome:
        return Outcome.of(
            self._feed,
            failed=failure is not None,
            skips=skips,
            shares=self._feed.microbatches if shares else 0,
            relayed=relayed,
            preempted=self.asks_to_stop is not None and self.asks_to_stop(),
        )

    def _exchanged(self, failure: Failure | None, what: str, skips: bool) -> list[Outcome]:
        feed, relay, relayed = self._feed, self.relay, None
        # One process has all losses, and need not wait.
        shares = feed.shares and self._transport.size > 1
        if shares and relay is not None:
            relayed = relay.share({} if failure else feed.losses, feed.microbatches)
        mine = self._mine(failure, skips=skips, shares=shares, relayed=relayed is not None)
        outcomes = [Outcome(row) for row in self._transport.exchange(mine.numbers, what)]
        if relay is not None:
            relay.settle()
        if shares and not any(outcome.failed for outcome in outcomes):
            Outcome.share(outcomes, feed, relayed)
        return outcomes

    def routes(self, got: Mapping[int, Sequence[str]]) -> dict[str, int]:
        """The last stage of all ranks that gets each skip; ``got`` has the skips of stages here."""
        routes: dict[str, int] = {}
        mine, shape = list(got.items()), [(int, [str])]
        shared = share_values(self._transport, mine, shape, "skips of a step", what="the skips")
        for stage, names in (each for skips in shared for each in skips):
            routes |= {name: max(stage, routes.get(name, 0)) for name in names}
        return routes

    def raise_first(self, error: TaktlineError | None) -> NoReturn:
        """Raise the same error on every rank: that of the first rank that has one."""
        self._feed.clear()
        shared = share_error(self._transport, error)
        if shared is None:
            raise MismatchError("a rank failed without saying why; look at the other ranks' output")
        raise shared

    def located(self, error: Exception) -> TaktlineError:
        """An error from before or after the program, with its rank."""
        rank = f"rank {self._transport.rank}: " if self._transport.size > 1 else ""
        if isinstance(error, TaktlineError):
            located = retold(error, f"{rank}{text_of(error)}")
        else:
            located = BatchError(f"{rank}{type(error).__name__}: {text_of(error)}")
        located.__cause__ = error
        return located


def _outcomes(rows: Sequence[Sequence[int]]) -> list[Outcome]:
    """The outcomes in posts, which begin with a call."""
    return [Outcome(row[len(Call._fields) :]) for row in rows]


def _share_late(post: Post, relayed: RelayedLosses | None, feed: Feed) -> None:
    """Put the losses of all ranks into a feed, once all have posted them."""
    Outcome.share(_outcomes(post.read()), feed, None if relayed is None else relayed.read())
