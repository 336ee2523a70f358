"""Agreement among ranks: what each says of its step, and the first difference.

Ranks share one record before a step and one at its end. If a rank has an error, all ranks raise it;
otherwise the first field in which records differ is named by a table.

With run_ahead a step like the one before needs no exchange: every rank gets the whole batch, so
that all know its kind. At the end each rank posts its record and goes on; the records of a step are
read before the next but one::

    waiting      rank 0   F F F F I I W I W I W W         │ F F …
                 rank 1     F F F I F I W I W I W W       │   F …       all ranks end together
                 rank 2       F F I F I F I W I W W W     │     …

    run_ahead    rank 0   F F F F I I W I W I W W F F …
                 rank 1     F F F I F I W I W I W W F …
                 rank 2       F F I F I F I W I W W W …
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from taktline.errors import BatchError, MismatchError, StageError, TaktlineError, text_of
from taktline.runtime.losses import LossRelay, RelayedLosses, losses_as_numbers, put_losses
from taktline.runtime.program import Failure
from taktline.runtime.replicas import Replicas
from taktline.runtime.step_data import Feed
from taktline.text import by_rank, counted
from taktline.transport import Transport, local
from taktline.transport.communicators import default_group
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import retold, share_error, share_values
from taktline.transport.posts import Post, Posts

_log = logging.getLogger("taktline")
ALIKE = "pass the same on every rank"


class Record(NamedTuple):
    """What one rank says of its call of step() or eval(), as numbers."""

    failed: int = 0
    """1 if the rank has an error."""
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
    skips: int = 0
    """At the end of a step: whether stages of this rank have got skips."""
    preempted: int = 0
    """At the end of a step: whether this rank was asked to stop."""
    losses: tuple[int, ...] = ()
    """At the end of a step whose losses are shared."""

    @property
    def kind(self) -> tuple[int, ...]:
        """The numbers on which the messages of a step depend."""
        sizes = (self.schedule, self.plan, self.batch, self.target)
        return (*sizes, self.shares, self.traces, self.inputs, self.whole)

    @property
    def numbers(self) -> list[int]:
        """All fields, to be shared."""
        return [*self[:-1], *self.losses]

    @classmethod
    def read(cls, ranks: Sequence[Sequence[int]]) -> list[Record]:
        """The records whose numbers the ranks have shared."""
        count = len(cls._fields) - 1
        for rank, numbers in enumerate(ranks):
            if len(numbers) < count:
                raise MismatchError(
                    f"rank {rank} runs another version of Taktline; install the same on every rank"
                )
        return [Record(*numbers[:count], losses=tuple(numbers[count:])) for numbers in ranks]


class Field(NamedTuple):
    """A field that all ranks must have in common, and the words if they do not."""

    name: str
    what: str
    advice: str
    show: Callable[[Any], object] = str
    """The value, in words."""
    optional: bool = False
    """Whether 0 stands for nothing, and fits any value."""
    latest: str = ""
    """Only ranks with the highest value of this field are compared."""


_DATA = (
    "inputs would meet the targets of other samples. Pass every rank of a pipeline the same batch: "
    "draw it from a generator of its own, or read it on one rank and hand it on with "
    "pipe.loader(…)"
)

WHICH_STEP = (
    Field(
        "schedule",
        "the ranks step different schedules, counted by their first steps",
        "step the same schedules in the same order on every rank",
        lambda number: f"number {number}" if number else "a new one",
    ),
    Field(
        "place",
        "the ranks begin with different schedules of those made and not stepped yet",
        "make and step the schedules in the same order on every rank",
        lambda place: f"number {place + 1}",
        latest="waiting",
    ),
    Field(
        "call",
        "the ranks are in different calls of step() and eval()",
        "a rank has left one out, or made one more. Make the same calls on every rank",
        lambda number: f"number {number}",
    ),
    Field(
        "step",
        "the ranks disagree on the number of training steps so far",
        "set steps on every rank when you resume",
    ),
)
"""Fields of a record by which ranks see that they are in the same step."""

KIND_OF_STEP = (
    Field("shares", "the ranks disagree on the value of share_losses", ALIKE, bool),
    Field(
        "traces",
        "the ranks disagree on the use of trace()",
        "enter and leave it on every rank at the same place",
        bool,
    ),
    Field(
        "plan",
        "the ranks run different plans",
        "step the same schedule on every rank",
        lambda digest: f"{digest:015x}"[:8],
    ),
    Field(
        "batch",
        "the batch has different sizes",
        "pass every rank its part of one batch",
        optional=True,
    ),
)
"""Fields of a record on which the messages of a step depend."""

DATA_OF_STEP = tuple(
    Field(
        name,
        f"the ranks were given different {name} in call {{compared}}",
        _DATA,
        lambda digest: f"digest {digest:016x}"[:15],
        optional=True,
        latest="compared",
    )
    for name in ("arguments", "targets")
)
"""Fields of a record by which ranks see that they were given the same data."""


def difference(table: Sequence[Field], ranks: Sequence[Any]) -> str | None:
    """The first field of a table that differs among the ranks, in words; None if none does."""
    if len(ranks) == 1:
        return None
    for name, what, advice, show, optional, latest in table:
        values = [getattr(rank, name) for rank in ranks]
        if values.count(values[0]) == len(values):
            continue
        highest = max(getattr(rank, latest) for rank in ranks) if latest else None
        found: dict[Any, list[str]] = {}
        for number, (rank, value) in enumerate(zip(ranks, values, strict=True)):
            if not (optional and not value) and (not latest or getattr(rank, latest) == highest):
                found.setdefault(value, []).append(str(number))
        if len(found) > 1:
            shown = [f"{show(value)} on rank {', '.join(of)}" for value, of in found.items()]
            return f"{what.format(compared=highest)}: {'; '.join(shown)}; {advice}"
    return None


def other_kind(records: Sequence[Record]) -> str | None:
    """Why ranks in one step have no common batch for it; None if they have."""
    if reason := difference(KIND_OF_STEP, records):
        return reason
    batch = max(record.batch for record in records)
    for rank, record in enumerate(records):
        # Not always equal: a target may have one entry a token.
        if batch and record.target % batch:
            return (
                f"the batch has {counted(batch, 'row')}, but the target on rank {rank} has "
                f"{record.target}; pass arguments and target of one batch, with as many entries "
                "for each row, or say with target_chunk_spec=… how the target is cut by itself"
            )
    return difference(DATA_OF_STEP, records)


class Agreement:
    """Raises the same error on all ranks of a pipeline and its replicas, and shares losses."""

    def __init__(self, transport: Transport, replicas: Replicas, feed: Feed) -> None:
        self._transport = transport
        self._replicas = replicas
        self._feed = feed
        self.relay: LossRelay | None = None
        """Carries losses to the other ranks where reading them would wait for a GPU."""
        self.asks_to_stop: Callable[[], bool] | None = None
        """Whether this rank shall end after the running step."""
        self.preempted = False
        """Whether any rank asked to stop in the latest step whose outcome is known."""
        self.posts: Posts | None = None
        """Where the outcome of the running step is posted, if it has no exchange."""

    @contextmanager
    def with_replicas(self, what: str) -> Iterator[None]:
        """An error raised inside in one replica is raised at the end of the block in all."""
        try:
            yield
        except TaktlineError as raised:
            raise self._replicas.agree(raised, what) or raised from raised.__cause__
        if (elsewhere := self._replicas.agree(None, what)) is not None:
            raise elsewhere

    def share(self, mine: Record, what: str) -> list[Record]:
        """The records of all ranks."""
        records = Record.read(self._transport.exchange(mine.numbers, what))
        if self.relay is not None:
            self.relay.settle()
        return records

    def require_all(self, records: Sequence[Record], error: TaktlineError | None) -> None:
        """Raise the error of the first rank that has one, the same on every rank."""
        if any(record.failed for record in records):
            raise share_error(self._transport, error) or MismatchError(
                "a rank failed without saying why; look at the other ranks' output"
            )

    def conclude(self, mine: Record, failure: Failure | None, what: str) -> bool:
        """Agree on the outcome, and on shared losses; returns whether any rank has skips."""
        feed, relayed = self._feed, None
        # One process has all losses, and need not wait.
        shares = feed.shares and self._transport.size > 1
        with self.with_replicas(what):
            if shares and self.relay is not None:
                relayed = self.relay.share({} if failure else feed.losses, feed.microbatches)
            mine = self._outcome(mine, failure, shares=shares, relayed=relayed is not None)
            records = self.share(mine, what)
            self.preempted = any(record.preempted for record in records)
            self.require_all(records, None if failure is None else failure.error)
            if shares:
                put_losses([record.losses for record in records], feed, relayed)
        return any(record.skips for record in records)

    def begin_ahead(self, posts: Posts) -> None:
        """Begin a step without an exchange."""
        self.posts = posts
        posts.begin()

    def end_ahead(self) -> None:
        """End such a step, whether or not it has worked."""
        if self.posts is not None:
            self.posts.end()
            self.posts = None

    def post(self, mine: Record) -> None:
        """Post the outcome of a step that has worked here, without waiting for other ranks."""
        feed, relayed, posts = self._feed, None, self.posts
        assert posts is not None
        if feed.shares and self.relay is not None:
            relayed = self.relay.share_aside(feed.losses, feed.microbatches)
        mine = self._outcome(mine, None, shares=feed.shares, relayed=relayed is not None)
        post = posts.post(mine.numbers, self._check_post)
        if feed.shares:
            feed.late = partial(_put_late, post, relayed)

    def _check_post(self, rows: Sequence[Sequence[int]]) -> None:
        """Raise if the ranks were in different steps."""
        records = Record.read(rows)
        if reason := difference(WHICH_STEP, records) or other_kind(records):
            raise MismatchError(f"an earlier step: {reason}")
        self.preempted |= any(record.preempted for record in records)

    def _outcome(
        self, mine: Record, failure: Failure | None, *, shares: bool, relayed: bool
    ) -> Record:
        failed = failure is not None
        losses = losses_as_numbers(self._feed, failed=failed, relayed=relayed) if shares else ()
        stops = self.asks_to_stop is not None and self.asks_to_stop()
        return mine._replace(failed=int(failed), preempted=int(stops), losses=tuple(losses))

    def routes(self, got: Mapping[int, Sequence[str]]) -> dict[str, int]:
        """The last stage of all ranks that gets each skip; ``got`` has the skips of stages here."""
        routes: dict[str, int] = {}
        mine, shape = list(got.items()), [(int, [str])]
        shared = share_values(self._transport, mine, shape, "skips of a step", what="the skips")
        for stage, names in (each for skips in shared for each in skips):
            routes |= {name: max(stage, routes.get(name, 0)) for name in names}
        return routes

    def located(self, error: Exception) -> TaktlineError:
        """An error from before or after the program, with its rank."""
        rank = f"rank {self._transport.rank}: " if self._transport.size > 1 else ""
        return located(error, rank, BatchError)

    def failure(self, error: Exception) -> Failure:
        """An error outside of the program, which all ranks hear of at the end of the step.

        A step without an exchange raises it: other ranks may have ended it.
        """
        failure = Failure(self.located(error))
        self.require_exchange(failure)
        return failure

    def require_exchange(self, failure: Failure | None) -> None:
        """Raise if a step without an exchange has failed."""
        if failure is not None and self.posts is not None:
            error = failure.error or MismatchError(
                "another rank has failed in this step; look at its output, and call reconnect()"
            )
            error.recoverable = "reconnect"
            raise error

    def has_verdict(self) -> bool:
        """Whether the ranks know that one of them has failed."""
        return isinstance(self._transport, Distributed) and self._transport.verdict is not None

    def cause(self, error: BaseException) -> TaktlineError | None:
        """Why another rank's failure has raised an error here; None if it is this rank's own."""
        return self._transport.explain(error) if isinstance(self._transport, Distributed) else None

    def judge(self, error: Exception, located: StageError | None) -> None:
        """Raise if the ranks cannot go on: another rank failed, or others compute with this one."""
        if (cause := self.cause(error)) is not None:
            raise cause from error
        if located is None or not isinstance(self._transport, Distributed):
            return
        if self.posts is not None:
            located.recoverable = "reconnect"
            raise located
        # The ranks that compute with this one wait for it in the middle of an action.
        if self._replicas.computes_together(located.stage):
            self._transport.raised(located)
            raise located


def located(error: Exception, rank: str, other: type[TaktlineError]) -> TaktlineError:
    """An error for all ranks: with its rank, and of the class ``other`` if it is not ours."""
    if isinstance(error, TaktlineError):
        found = retold(error, f"{rank}{text_of(error)}")
    else:
        found = other(f"{rank}{type(error).__name__}: {text_of(error)}")
    found.__cause__ = error
    return found


def _put_late(post: Post, relayed: RelayedLosses | None, feed: Feed) -> None:
    """Put the losses of all ranks into a feed, once all have posted them."""
    losses = [record.losses for record in Record.read(post.read())]
    put_losses(losses, feed, None if relayed is None else relayed.read())


class Agreed(NamedTuple):
    """A training step on which the ranks agreed by an exchange."""

    record: Record
    kind: tuple[int, ...]
    rows: int


def repeatable(records: Sequence[Record], rank: int, kind: tuple[int, ...]) -> Agreed | None:
    """The step of these records, if others like it need no exchange; None if they do."""
    first = records[0].whole
    if not first or any(record.whole != first for record in records):
        return None
    return Agreed(records[rank], kind, max(record.batch for record in records))


def warn_of_no_effect(records: Sequence[Record]) -> None:
    """Log why steps are not repeatable."""
    given = ["a batch" if record.whole else "none" for record in records]
    _log.warning(
        "run_ahead has no effect: pass the whole batch, with its target, on every rank; ranks got "
        "%s",
        by_rank(given) if "none" in given else "batches of different shapes",
    )


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
        ranks, new = self.maker or group, _Schedules()
        self._siblings = new if ranks is None else _by_ranks.setdefault(ranks, new)
        self._siblings.waiting.append(ref(self))

    def waiting(self, transport: Transport) -> tuple[int, int]:
        """How many schedules wait for their first step, and the place of this one among them."""
        here = None if isinstance(transport, Distributed) else transport
        waiting = [each for known in self._siblings.waiting if (each := known()) is not None]
        # Local ranks whose schedules were all made in one place have no places of their own.
        if self.number or self.maker is not here:
            return 0, 0
        return len(waiting), waiting.index(self)

    def proposed(self) -> int:
        """The next number on this rank."""
        return self._siblings.numbered + 1

    def adopt(self, number: int) -> None:
        """Take the number that the ranks have agreed on."""
        siblings = self._siblings
        self.number = siblings.numbered = number
        siblings.waiting = [each for each in siblings.waiting if each() not in (None, self)]


class _Schedules:
    """The schedules that this rank has made for the same ranks."""

    def __init__(self) -> None:
        self.waiting: list[ref[ScheduleNumber]] = []
        self.numbered = 0


_by_ranks: WeakKeyDictionary[object, _Schedules] = WeakKeyDictionary()
