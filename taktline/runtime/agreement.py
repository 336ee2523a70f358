"""Agreement among ranks: what each says of its call, and the first difference.

Ranks share one record before a step and one at its end. If a rank has an error, all ranks raise it;
otherwise the first field in which records differ is named by a table. What takes longer to say, as
before a first step and when a pipeline is built, is compared as a blueprint: a list of texts, of
which the records have a digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn

from taktline.errors import BatchError, MismatchError, StageError, TaktlineError, text_of
from taktline.plan import Plan
from taktline.runtime.fingerprint import digest_of
from taktline.runtime.losses import LossRelay, losses_as_numbers, put_losses
from taktline.runtime.program import Failure
from taktline.runtime.replicas import Replicas
from taktline.runtime.stage_actions import Feed
from taktline.runtime.ties import TieUse, untied
from taktline.stage import PipelineStage
from taktline.stage.names import OPTION, PLACE, TOPICS, Blueprint, attached, blueprint
from taktline.text import by_rank, counted
from taktline.transport import Transport
from taktline.transport.distributed import Distributed
from taktline.transport.exchange import retold, share_error, share_values

T = TypeVar("T")

BUILDING = "Pipeline(…)"
NO_STORY = "a rank failed without saying why; look at the other ranks' output"


class Record(NamedTuple):
    """What one rank says of its call of step() or eval(), as numbers; 0 fits any other value."""

    failed: int = 0
    """1 if the rank has an error."""
    schedule: int = 0
    """Which schedule of these ranks it is, by their first steps."""
    call: int = 0
    """Which call of this schedule's step() and eval() it is."""
    step: int = 0
    """The number of training steps so far."""
    shares: int = 0
    """Whether every rank gets the losses."""
    traces: int = 0
    """Whether a trace is being recorded."""
    plan: int = 0
    batch: int = 0
    """The size of the batch along its micro-batches, 0 if this rank got none."""
    target: int = 0
    """The same for the target, unless it has a chunk spec of its own."""
    inputs: int = 0
    """A digest of the shapes and types of the arguments."""
    compared: int = 0
    """The call whose data the fingerprints describe; 0 for none."""
    arguments: int = 0
    """The fingerprint of the data in the arguments; 0 if the rank got none."""
    targets: int = 0
    """The fingerprint of the target."""
    skips: int = 0
    """At the end of a step: whether stages of this rank have got skips."""
    preempted: int = 0
    """At the end of a step: whether this rank was asked to stop."""
    losses: tuple[int, ...] = ()
    """At the end of a step whose losses are shared."""

    @classmethod
    def read(cls, ranks: Sequence[Sequence[int]]) -> list[Record]:
        """The records whose numbers the ranks have shared."""
        count = len(cls._fields) - 1
        if min(map(len, ranks)) < count:
            raise MismatchError("a rank runs another version of Taktline; install one on all ranks")
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


SAME_STEP = (
    Field(
        "schedule",
        "the ranks step different schedules, counted by their first steps",
        "step the same schedules in the same order on every rank",
        lambda number: f"number {number}" if number else "a new one",
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

SAME_KIND = (
    Field(
        "shares",
        "the ranks disagree on the value of share_losses",
        "pass the same on every rank",
        bool,
    ),
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

SAME_DATA = tuple(
    Field(
        name,
        f"the ranks were given different {name}",
        "inputs would meet the targets of other samples. Pass every rank of a pipeline the same "
        "batch: draw it from a generator of its own, or read it on one rank and hand it on with "
        "pipe.loader(…)",
        lambda digest: f"digest {digest:016x}"[:15],
        optional=True,
    )
    for name in ("arguments", "targets")
)
"""Fields of a record by which ranks see that they were given the same data."""


def difference(table: Sequence[Field], ranks: Sequence[Any]) -> str | None:
    """The first field of a table that differs among the ranks, in words; None if none does."""
    for name, what, advice, show, optional in table:
        values = [getattr(rank, name) for rank in ranks]
        given = [value for value in values if value or not optional]
        if given and given.count(given[0]) != len(given):
            shown = [show(value) if value or not optional else None for value in values]
            return f"{what}: {by_rank(shown)}; {advice}"
    return None


def other_kind(records: Sequence[Record]) -> str | None:
    """Why ranks in one step have no common batch for it; None if they have."""
    if reason := difference(SAME_KIND, records):
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
    # Some GPU may have found what another one still computes.
    latest = max(record.compared for record in records)
    unknown = {"arguments": 0, "targets": 0}
    known = [each if each.compared == latest else each._replace(**unknown) for each in records]
    return difference(SAME_DATA, known)


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

    @contextmanager
    def with_replicas(self, what: str) -> Iterator[None]:
        """An error raised inside in one replica is raised at the end of the block in all."""
        try:
            yield
        except TaktlineError as raised:
            raise self._replicas.agree(raised, what) or raised from raised.__cause__
        if (elsewhere := self._replicas.agree(None, what)) is not None:
            raise elsewhere

    def share(self, mine: Record, error: TaktlineError | None, what: str) -> list[Record]:
        """The records of all ranks; raises the error of the first rank that has one."""
        numbers = [*mine[:-1], *mine.losses]
        records = Record.read(self._transport.exchange(numbers, what))
        if self.relay is not None:
            self.relay.settle()
        if any(record.failed for record in records):
            raise share_error(self._transport, error) or MismatchError(NO_STORY)
        return records

    def conclude(self, mine: Record, failure: Failure | None, what: str) -> bool:
        """Agree on the outcome, and on shared losses; returns whether any rank has skips."""
        feed, relayed = self._feed, None
        # One process has all losses, and need not wait.
        shares = feed.shares and self._transport.size > 1
        with self.with_replicas(what):
            if shares and self.relay is not None:
                relayed = self.relay.share({} if failure else feed.losses, feed.microbatches)
            mine = mine._replace(
                failed=int(failure is not None),
                preempted=int(self.asks_to_stop is not None and self.asks_to_stop()),
                losses=losses_as_numbers(feed, failure is not None, relayed) if shares else (),
            )
            records = self.share(mine, None if failure is None else failure.error, what)
            self.preempted = any(record.preempted for record in records)
            if shares:
                put_losses([record.losses for record in records], feed, relayed)
        return any(record.skips for record in records)

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
        return located(error, self._transport, BatchError)

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
        # The ranks that compute with this one wait for it in the middle of an action.
        together = located is not None and self._replicas.computes_together(located.stage)
        if located is not None and together and isinstance(self._transport, Distributed):
            self._transport.raised(located)
            raise located


def located(error: Exception, transport: Transport, other: type[TaktlineError]) -> TaktlineError:
    """An error for all ranks: with its rank, and of the class ``other`` if it is not ours."""
    rank = f"rank {transport.rank}: " if transport.size > 1 else ""
    if isinstance(error, TaktlineError):
        found = retold(error, f"{rank}{text_of(error)}")
    else:
        found = other(f"{rank}{type(error).__name__}: {text_of(error)}")
    found.__cause__ = error
    return found


_TIE = {"tie": {"uses": [(int, str)]}, "stage": int, "kind": str, "identity": str}
INTRODUCTION = {
    "options": int,  # the digest of what the schedule was given
    "model": int,  # that of the model that the stages were cut from; 0 if it is not known
    "stages": [int],
    "shards": bool,  # whether a stage is gathered before it computes
    "reduces": bool,  # whether a stage averages its gradients over replicas
    "in_company": bool,  # whether processes of other pipelines share the work of its stages
    "ties": [_TIE],  # the tied weights in the rank's stages
    "number": int,  # what the rank proposes as the schedule's number; that of rank 0 counts
}
"""What a rank says of its part of a schedule, once before the first step."""


def introduce(
    transport: Transport,
    mine: Mapping[str, Any],
    options: Blueprint,
    model: Blueprint,
    rank_of: Sequence[int],
) -> list[dict[str, Any]]:
    """Share what this rank says of its schedule; raises unless all ranks fit together.

    ``rank_of`` has the rank of each stage, by the plan.
    """
    said = {"options": digest(options), "model": digest(model), **mine}
    what = "what a rank says of itself, that"
    ranks = share_values(transport, said, INTRODUCTION, "the first step", what=what)
    for name, whole in (("options", options), ("model", model)):
        if reason := first_difference(transport, whole, [rank[name] for rank in ranks]):
            raise MismatchError(reason)
    if reason := misfit(ranks, rank_of):
        raise MismatchError(reason)
    return ranks


def misfit(ranks: Sequence[Mapping[str, Any]], rank_of: Sequence[int]) -> str | None:
    """Why ranks with these introductions cannot run a schedule together; None if they can."""
    misplaced: list[str] = []
    for rank, said in enumerate(ranks):
        needs = [stage for stage, there in enumerate(rank_of) if there == rank]
        if sorted(said["stages"]) != needs:
            misplaced.append(
                f"rank {rank} has {_listed(said['stages'])} and needs {_listed(needs)}"
            )
    if misplaced:
        return f"the stages are not where the schedule runs them: {'; '.join(misplaced)}"
    return untied([TieUse.from_plain(use) for said in ranks for use in said["ties"]])


def _listed(stages: Sequence[int]) -> str:
    if not stages:
        return "no stage"
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def option(name: str, value: object) -> tuple[str, str, str]:
    """The entry of a blueprint for something that was passed."""
    return OPTION, name, str(value)


def digest(mine: Blueprint) -> int:
    """A number for a blueprint; 0 for an empty one, which fits all others."""
    return digest_of(text for entry in mine for text in entry) | 1 if mine else 0


def whole_model(stages: Sequence[PipelineStage]) -> Blueprint:
    """The blueprint of the model that stages were cut from; empty if it is not known."""
    found = {stage.stage_index: whole for stage in stages if (whole := attached(stage.submod))}
    for stage, whole in found.items():
        if whole != next(iter(found.values())):
            raise MismatchError(
                f"stages {next(iter(found))} and {stage} of this rank were cut from different "
                "models, or at different places; take all stages from one split"
            )
    return next(iter(found.values()), ())


def first_difference(
    transport: Transport, mine: Blueprint, digests: Sequence[int], noun: str = "rank"
) -> str | None:
    """The first difference between the blueprints of two ranks; None if all are the same.

    All ranks take part, and return the same.
    """
    counts = Counter(number for number in digests if number)
    if len(counts) < 2:
        return None
    ((most, _),) = counts.most_common(1)  # the first of several
    other = next(number for number in digests if number not in (0, most))
    # Only one rank for each sends its own: those of a thousand ranks would take too long.
    ranks = [digests.index(number) for number in (most, other)]
    sent = list(mine) if transport.rank in ranks else []
    shared = share_values(transport, sent, [(str, str, str)], "the models of ranks", what="these")
    one, two = ({(topic, name): text for topic, name, text in shared[rank]} for rank in ranks)
    found = _worded(f"{noun} {ranks[0]}", f"{noun} {ranks[1]}", one, two)
    return (
        f"the {noun}s do not build the same pipeline: {found}; build the same "
        f"model with the same options and cuts on every {noun}"
    )


_Texts = Mapping[tuple[str, str], str]
"""What a blueprint says, by topic and name."""


def _worded(first: str, second: str, one: _Texts, two: _Texts) -> str:
    """The first difference between the texts of two ranks."""
    for topic, name in sorted({**one, **two}, key=lambda key: TOPICS.index(key[0])):
        text, text2 = one.get((topic, name)), two.get((topic, name))
        if text == text2:
            continue
        if topic == PLACE:
            places = text or "no stage", text2 or "no stage"
            return f"{name} is in {places[0]} on {first}, but in {places[1]} on {second}"
        if text is None or text2 is None:
            lacks, has = (first, second) if text is None else (second, first)
            return f"{lacks} has no {topic} {name}, which is {text or text2} on {has}"
        return f"{topic} {name} is {text} on {first}, but {text2} on {second}"
    return f"tensors or modules are in another order on {second} than on {first}"


def compared(
    plan: Plan, modules: Mapping[int, nn.Module], *, seed: int | None, **options: object
) -> dict[str, Blueprint]:
    """What a process says of its pipeline when it is built, to ranks and to replicas of it.

    To others, "", which may hold other parts of its stages, it says less.

    Args:
        plan: what the pipeline runs.
        modules: all stages, or those of one rank.
        seed: may differ between replicas.
        options: what else was passed.
    """
    given = {
        "schedule": plan.name,
        "microbatches": plan.microbatches,
        "number of stages": plan.stages,
        **options,
        "plan": plan.digest()[:8],
    }
    passed = tuple(option(name, value) for name, value in given.items())
    model = attached(modules[min(modules)]) if plan.stages > 1 else ()
    whole = model if len(modules) == plan.stages else ()
    return {
        "rank": (*passed, option("seed", seed), *model),
        "replica": (*passed, *(whole or blueprint(modules))),
        "": passed,
    }


def together(
    ranks: Any, make: Callable[[], T], said: Callable[[T], Mapping[str, Blueprint]] = lambda _: {}
) -> T:
    """What a function returns, if it works on all ranks of all replicas, and they say the same.

    Otherwise all of them raise; a rank with an error of its own raises that one. ``ranks`` are
    those of ``taktline.train.ranks``, over all dimensions of the mesh.
    """
    made, mine, error, known = None, {}, None, None
    try:
        made = make()
        mine = said(made)
    except Exception as raised:  # of the user's code, too
        error = raised
        known = located(error, ranks.transport, MismatchError)

    def of(noun: str) -> Blueprint:
        return mine.get(noun, mine.get("", ()))

    def differ(noun: str, transport: Transport, rows: list[list[int]]) -> str | None:
        return first_difference(transport, of(noun), [row[0] for row in rows], noun)

    elsewhere = ranks.agreed(known, BUILDING, lambda noun: [digest(of(noun))], differ)
    if error is not None:
        raise error
    if elsewhere is not None:
        raise elsewhere
    return cast("T", made)
