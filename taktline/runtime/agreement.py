"""What the ranks tell each other before a step, and what does not fit together, in words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from taktline.checks import read
from taktline.errors import MismatchError
from taktline.meta import Signature
from taktline.plan import Placement, Plan
from taktline.runtime.holders import Use, untied
from taktline.stage import PipelineStage
from taktline.text import by_rank, counted
from taktline.transport.describe import decode, encode

__all__ = [
    "Call",
    "Introduction",
    "check_stages",
    "examples",
    "misfit",
    "mismatch",
    "out_of_step",
]


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a rank brings to a schedule; told once, before its first step."""

    schedule: str
    microbatches: int
    num_stages: int
    stages: list[int]
    rank_of: list[int]
    """Where the plan wants each stage."""
    plan: str
    """The plan's fingerprint."""
    trains: bool
    dynamic_shapes: bool
    shards: bool = False
    """Whether a stage is to be gathered before it computes."""
    reduces: bool = False
    """Whether a stage averages its gradients over replicas."""
    entangled: bool = False
    """Whether processes outside of the pipeline take part in what its stages do."""
    takes: list[tuple[int, str]] = field(default_factory=list)
    """What each stage takes, where its user has given an example, as text."""
    gives: list[tuple[int, str]] = field(default_factory=list)
    """What each stage gives, likewise."""
    ties: list[dict[str, Any]] = field(default_factory=list)
    """How its stages hold weights that several stages share."""
    number: int = 1
    """What the rank would number the schedule; the first rank's counts."""

    @property
    def uses(self) -> list[Use]:
        """The same, from the wire."""
        return [Use.from_plain(plain) for plain in self.ties]

    def to_text(self) -> str:
        """For the wire."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Introduction:
        """From the wire."""
        return cls(**read(text, _INTRODUCTION, what="what a rank says of itself"))


_TIE = {"tie": {"uses": [(int, str)]}, "stage": int, "look": str, "identity": str}
_INTRODUCTION = {
    "number": int,
    "schedule": str,
    "microbatches": int,
    "num_stages": int,
    "stages": [int],
    "rank_of": [int],
    "plan": str,
    "trains": bool,
    "dynamic_shapes": bool,
    "shards": bool,
    "reduces": bool,
    "entangled": bool,
    "takes": [(int, str)],
    "gives": [(int, str)],
    "ties": [_TIE],
}


def check_stages(stages: Sequence[PipelineStage], plan: Plan) -> None:
    """Raise if a stage belongs to a model of another number of stages."""
    for stage in stages:
        if stage.num_stages != plan.stages:
            raise MismatchError(
                f"stage {stage.stage_index} is one of {stage.num_stages} (num_stages), but "
                f"the plan has {counted(plan.stages, 'stage')}; give both the same"
            )


def examples(given: Mapping[int, Signature | None]) -> list[tuple[int, str]]:
    """The examples that a user has given for stages, as texts."""
    return [(stage, encode(example).decode()) for stage, example in given.items() if example]


def misfit(ranks: Sequence[Introduction]) -> str | None:
    """Why these ranks cannot run a schedule together; None if they can.

    Every rank comes to the same answer, since all see the same introductions.
    """
    for name, noun in (
        ("schedule", "schedule"),
        ("microbatches", "number of micro-batches"),
        ("num_stages", "number of stages"),
        ("trains", "presence of a loss_fn"),
        ("dynamic_shapes", "value of dynamic_shapes"),
    ):
        if story := _differs(noun, [getattr(rank, name) for rank in ranks]):
            return f"{story}; give every rank the same"
    if story := _misplaced([rank.stages for rank in ranks], ranks[0].rank_of):
        return story
    if story := _misshaped(ranks):
        return story
    if story := untied([use for rank in ranks for use in rank.uses]):
        return story
    if _differs("plan", [rank.plan for rank in ranks]):
        groups = by_rank([rank.plan[:8] for rank in ranks])
        return f"the ranks have different plans: {groups}; build or read the same plan on each"
    return None


def _misshaped(ranks: Sequence[Introduction]) -> str | None:
    """Where the examples of two neighbouring stages do not fit together."""
    takes = {stage: (r, text) for r, rank in enumerate(ranks) for stage, text in rank.takes}
    gives = {stage: (r, text) for r, rank in enumerate(ranks) for stage, text in rank.gives}
    for stage in sorted(gives.keys() & {stage - 1 for stage in takes}):
        (giver, given), (taker, taken) = gives[stage], takes[stage + 1]
        output, expected = decode(given.encode()), decode(taken.encode())
        if difference := expected.difference(
            output.leaves, output.spec, any_batch=True, gradients=False
        ):
            return (
                f"stage {stage} on rank {giver} gives {output} (output_args), but stage "
                f"{stage + 1} on rank {taker} takes {expected} (input_args): {difference}"
            )
    return None


def _misplaced(held: Sequence[Sequence[int]], rank_of: Sequence[int]) -> str | None:
    """Where the stages that each rank holds are not those that the plan gives it."""
    placement = Placement.custom(rank_of, len(held))
    wanted = [list(placement.stages_of(rank)) for rank in range(len(held))]
    if [sorted(stages) for stages in held] == wanted:
        return None
    holders = {
        stage: [rank for rank, stages in enumerate(held) for s in stages if s == stage]
        for stage in range(len(rank_of))
    }
    words = [
        f"stage {stage} is missing: no rank has it"
        if not ranks
        else f"stage {stage} is there {len(ranks)} times: on rank {_listed(ranks)}"
        for stage, ranks in holders.items()
        if len(ranks) != 1
    ]
    if not words:
        words = ["the stages do not lie where the schedule runs them"]
    needs = "; ".join(
        f"rank {rank} has {_stages(has)} and needs {_stages(needs)}"
        for rank, (has, needs) in enumerate(zip(held, wanted, strict=True))
        if sorted(has) != needs
    )
    return f"{'; '.join(words)}. {needs[0].upper()}{needs[1:]}"


class Call(NamedTuple):
    """What a rank says of one call of step() or eval(), as numbers."""

    failed: int
    """1 if it could not even begin."""
    schedule: int
    """The number that the ranks have agreed on for it; 0 before its first step."""
    waiting: int
    """How many schedules of these ranks wait for their first step."""
    place: int
    """Which of them this is, in the order in which they were made."""
    call: int
    """Which call of this schedule's step() and eval() it is."""
    step: int
    """How many training steps there were before."""
    plan: int
    batch: int
    """The size of the batch along its micro-batches, 0 if this rank got none."""
    target: int
    """The same for the target, unless it is cut by itself."""
    shares: int
    """Whether every rank shall have the losses."""
    traces: int
    """Whether it notes what runs when."""
    inputs: int
    """A digest of the shapes and types of what it got."""
    looked_at: int = 0
    """In which call it has looked at its data; 0 if it has not."""
    arguments: int = 0
    """The fingerprint of the data in its arguments; 0 if it got none."""
    targets: int = 0
    """The same of its target."""

    @classmethod
    def read(cls, numbers: Sequence[int], rank: int) -> Call:
        """From the wire."""
        if len(numbers) != len(cls._fields):
            raise MismatchError(
                f"rank {rank} runs another version of Taktline; install the same on every rank"
            )
        return cls(*numbers)


def mismatch(calls: Sequence[Call]) -> str | None:
    """Why these calls cannot be one step; None if they can."""
    if len(calls) > 1 and (story := _disagreement(calls)):
        return story
    batch = max(call.batch for call in calls)
    for rank, call in enumerate(calls):
        # Not always equal: a target may have one entry a token.
        if batch and call.target % batch:
            return (
                f"the batch has {counted(batch, 'row')}, but the target on rank {rank} has "
                f"{call.target}; give arguments and target of one batch, with as many entries for "
                "each row, or say with target_chunk_spec=… how the target is cut by itself"
            )
    return None if len(calls) == 1 else _different_data(calls)


def _disagreement(calls: Sequence[Call]) -> str | None:
    """What the ranks do not say the same of."""
    if story := _differs("value of share_losses", [bool(call.shares) for call in calls]):
        return f"{story}; give every rank the same"
    if story := _differs("use of trace()", [bool(call.traces) for call in calls]):
        return f"{story}; enter and leave it on every rank at the same place"
    if len({call.plan for call in calls}) > 1:
        groups = by_rank([f"{call.plan:015x}"[:8] for call in calls])
        return f"the ranks run different plans: {groups}; step the same schedule on every rank"
    batches = {rank: call.batch for rank, call in enumerate(calls) if call.batch}
    if len(set(batches.values())) > 1:
        told = ", ".join(f"{size} on rank {rank}" for rank, size in batches.items())
        return f"the batch has different sizes: {told}; give every rank its part of one batch"
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
    if story := _differs("number of training steps so far", [call.step for call in calls]):
        return f"{story}; set steps on every rank when you resume"
    return None


def _different_data(calls: Sequence[Call]) -> str | None:
    """Which ranks were given other data than the rest of them."""
    latest = max(call.looked_at for call in calls)
    now = calls[0].call
    for what in ("arguments", "targets"):
        found = {
            rank: getattr(call, what)
            for rank, call in enumerate(calls)
            if call.looked_at == latest and getattr(call, what)
        }
        if len(set(found.values())) > 1:
            ((most, _),) = Counter(found.values()).most_common(1)  # the first of several
            one = next(rank for rank, data in found.items() if data == most)
            other = next(rank for rank, data in found.items() if data != most)
            when = "" if latest == now else f" in call {latest} (this is call {now})"
            return (
                f"the ranks were given different {what}{when}: those of rank {other} are not those "
                f"of rank {one}, so inputs would meet the targets of other samples. Give "
                "every rank of a pipeline the same batch: draw it from a generator of its own, "
                "or read it on one rank and hand it on with pipe.loader(…)"
            )
    return None


def _differs(noun: str, values: Sequence[object]) -> str | None:
    if len(set(values)) == 1:
        return None
    return f"the ranks disagree on the {noun}: {by_rank(values)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _stages(stages: Sequence[int]) -> str:
    return f"{counted(len(stages), 'stage')} ({_listed(stages)})" if stages else "no stage"
