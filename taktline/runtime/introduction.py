"""What ranks say of their schedule before its first step, and of their pipeline when it is built.

All ranks of all replicas have the same, or all of them raise the first difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self, TypeVar, cast

from torch import nn

from taktline.errors import MismatchError
from taktline.meta import Signature
from taktline.plan import Placement, Plan
from taktline.runtime.agreement import ALIKE, Field, difference, located
from taktline.runtime.fingerprint import digest_of
from taktline.runtime.ties import TieUse, untied
from taktline.stage import PipelineStage
from taktline.stage.blueprint import OPTION, PLACE, TOPICS, Blueprint, attached, blueprint
from taktline.text import counted
from taktline.transport import Transport
from taktline.transport.describe import decode, encode
from taktline.transport.exchange import share_values

T = TypeVar("T")

BUILDING = "Pipeline(…)"

_TIE = {"tie": {"uses": [(int, str)]}, "stage": int, "kind": str, "identity": str}
INTRODUCTION = {
    "schedule": str,
    "microbatches": int,
    "num_stages": int,
    "stages": [int],
    "rank_of": [int],  # the process of each stage, by the plan
    "plan": str,  # its digest
    "trains": bool,
    "dynamic_shapes": bool,
    "run_ahead": bool,
    "shards": bool,  # whether a stage is gathered before it computes
    "reduces": bool,  # whether a stage averages its gradients over replicas
    "in_company": bool,  # whether processes of other pipelines share the work of its stages
    "takes": [(int, str)],  # the input of each stage with an example, as text
    "gives": [(int, str)],  # the output likewise
    "ties": [_TIE],  # the tied weights in the rank's stages
    "model": int,  # a digest of the model that the stages were cut from; 0 if it is not known
    "number": int,  # what the rank proposes as the schedule's number; that of rank 0 counts
}
"""What a rank says of its part of a schedule, once before the first step."""

SCHEDULE = tuple(
    Field(name, f"the ranks disagree on the {noun}", ALIKE)
    for name, noun in (
        ("schedule", "schedule"),
        ("microbatches", "number of micro-batches"),
        ("num_stages", "number of stages"),
        ("trains", "presence of a loss_fn"),
        ("dynamic_shapes", "value of dynamic_shapes"),
        ("run_ahead", "value of run_ahead"),
    )
)
"""What all ranks say of a schedule before its first step."""

PLAN = (
    Field(
        "plan",
        "the ranks have different plans",
        "build or read the same plan on each",
        lambda digest: digest[:8],
    ),
)


def introduce(transport: Transport, mine: Mapping[str, Any], model: Blueprint) -> list[Any]:
    """Share what this rank says of its schedule; raises unless all ranks fit together."""
    said = "what a rank says of itself, that"
    shared = share_values(transport, mine, INTRODUCTION, "the first step", what=said)
    ranks = [introduced(plain) for plain in shared]
    models = [rank.model for rank in ranks]
    if reason := misfit(ranks) or model_difference(transport, model, models):
        raise MismatchError(reason)
    return ranks


def introduced(plain: Mapping[str, Any]) -> Any:
    """What another rank has said, with its fields as attributes."""
    return SimpleNamespace(**{**plain, "ties": [TieUse.from_plain(use) for use in plain["ties"]]})


def examples(given: Mapping[int, Signature | None]) -> list[tuple[int, str]]:
    """The examples that a user has given for stages, as texts."""
    return [(stage, encode(example).decode()) for stage, example in given.items() if example]


def misfit(ranks: Sequence[Any]) -> str | None:
    """Why ranks with these introductions cannot run a schedule together; None if they can."""
    return (
        difference(SCHEDULE, ranks)
        or _misplaced([rank.stages for rank in ranks], ranks[0].rank_of)
        or _misshaped(ranks)
        or untied([use for rank in ranks for use in rank.ties])
        or difference(PLAN, ranks)
    )


def _misshaped(ranks: Sequence[Any]) -> str | None:
    """Where the examples of two neighbouring stages do not fit together."""
    takes = {stage: (r, text) for r, rank in enumerate(ranks) for stage, text in rank.takes}
    gives = {stage: (r, text) for r, rank in enumerate(ranks) for stage, text in rank.gives}
    for stage in sorted(gives.keys() & {stage - 1 for stage in takes}):
        (giver, given), (taker, taken) = gives[stage], takes[stage + 1]
        output, expected = decode(given.encode()), decode(taken.encode())
        if found := expected.difference(output.leaves, output.spec, is_example=True):
            return (
                f"stage {stage} on rank {giver} has {output} (output_args), but stage {stage + 1} "
                f"on rank {taker} takes {expected} (input_args): {found}"
            )
    return None


def _misplaced(held: Sequence[Sequence[int]], rank_of: Sequence[int]) -> str | None:
    """Where ranks hold other stages than the plan places there."""
    placement = Placement.custom(rank_of, len(held))
    wanted = [list(placement.stages_of(rank)) for rank in range(len(held))]
    if [sorted(stages) for stages in held] == wanted:
        return None
    words: list[str] = []
    for stage in range(len(rank_of)):
        ranks = [rank for rank, stages in enumerate(held) for s in stages if s == stage]
        if not ranks:
            words.append(f"stage {stage} is missing: no rank has it")
        elif len(ranks) > 1:
            words.append(f"stage {stage} exists {len(ranks)} times: on rank {_listed(ranks)}")
    needs = "; ".join(
        f"rank {rank} has {_stages(has)} and needs {_stages(needs)}"
        for rank, (has, needs) in enumerate(zip(held, wanted, strict=True))
        if sorted(has) != needs
    )
    found = "; ".join(words) or "the stages are not where the schedule runs them"
    return f"{found}. {needs[0].upper()}{needs[1:]}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _stages(stages: Sequence[int]) -> str:
    return f"{counted(len(stages), 'stage')} ({_listed(stages)})" if stages else "no stage"


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


def model_difference(
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
    sides = [
        (f"{noun} {rank}", {(topic, name): text for topic, name, text in shared[rank]})
        for rank in ranks
    ]
    return (
        f"the {noun}s do not build the same pipeline: {_first_difference(*sides)}; build the same "
        f"model with the same options and cuts on every {noun}"
    )


_Side = tuple[str, dict[tuple[str, str], str]]
"""A rank in words, and its texts by topic and name."""


def _first_difference(one: _Side, other: _Side) -> str:
    for topic, name in sorted({**one[1], **other[1]}, key=lambda key: TOPICS.index(key[0])):
        (rank, text), (rank2, text2) = ((r, texts.get((topic, name))) for r, texts in (one, other))
        if text == text2:
            continue
        if topic == PLACE:
            first, second = text or "no stage", text2 or "no stage"
            return f"{name} is in {first} on {rank}, but in {second} on {rank2}"
        if text is None:
            return f"{rank} has no {topic} {name}, which is {text2} on {rank2}"
        if text2 is None:
            return f"{rank2} has no {topic} {name}, which is {text} on {rank}"
        return f"{topic} {name} is {text} on {rank}, but {text2} on {rank2}"
    return f"tensors or modules are in another order on {other[0]} than on {one[0]}"


@dataclass(frozen=True, slots=True)
class Compared:
    """What one rank says of its pipeline."""

    options: Blueprint = ()
    seed: Blueprint = ()
    """Replicas may have different ones."""
    model: Blueprint = ()
    """The same on all ranks of a pipeline, if it is known."""
    stages: Blueprint = ()
    """The same on all replicas of a rank."""

    @classmethod
    def of(
        cls, plan: Plan, modules: Mapping[int, nn.Module], *, seed: int | None, **options: object
    ) -> Self:
        """Of a plan and all stages, or those of one rank."""
        given = {
            "schedule": plan.name,
            "microbatches": plan.microbatches,
            "number of stages": plan.stages,
            **options,
            "plan": plan.digest()[:8],
        }
        model = attached(modules[min(modules)]) if plan.stages > 1 else ()
        whole = len(modules) == plan.stages
        return cls(
            tuple((OPTION, name, str(value)) for name, value in given.items()),
            ((OPTION, "seed", str(seed)),),
            model,
            model if model and whole else blueprint(modules),
        )

    def along(self, noun: str) -> Blueprint:
        """What ranks along a dimension of the mesh must have in common."""
        if noun == "rank":
            return *self.options, *self.seed, *self.model
        # Ranks of other dimensions may hold other parts of a stage.
        return *self.options, *(self.stages if noun == "replica" else ())

    def numbers(self, noun: str) -> list[int]:
        """A digest for the ranks along a dimension of the mesh."""
        return [digest(self.along(noun))]

    def difference(self, noun: str, transport: Transport, rows: list[list[int]]) -> str | None:
        """The first difference between two of them, in words."""
        return model_difference(transport, self.along(noun), [row[0] for row in rows], noun)


def together(ranks: Any, make: Callable[[], T], compared: Callable[[T], Compared]) -> T:
    """What a function returns, if it works on all ranks of all replicas, and these compare alike.

    Otherwise all of them raise; a rank with an error of its own raises that one. ``ranks`` are
    those of ``taktline.train.ranks``, over all dimensions of the mesh.
    """
    made, mine, error, known = None, Compared(), None, None
    try:
        made = make()
        mine = compared(made)
    except Exception as raised:  # of the user's code, too
        error = raised
        known = located(error, f"rank {ranks.transport.rank}: ", MismatchError)
    elsewhere = ranks.agreed(known, BUILDING, mine.numbers, mine.difference)
    if error is not None:
        raise error
    if elsewhere is not None:
        raise elsewhere
    return cast("T", made)
