"""All ranks of all replicas build the same pipeline, or all of them raise the first difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar, cast

from torch import nn

from taktline.errors import MismatchError, TaktlineError
from taktline.plan import Plan
from taktline.runtime.agreement import located
from taktline.runtime.fingerprint import digest_of
from taktline.stage import PipelineStage
from taktline.stage.blueprint import OPTION, PLACE, TOPICS, Blueprint, attached, blueprint
from taktline.transport import Transport
from taktline.transport.exchange import share_values

T = TypeVar("T")

BUILDING = "Pipeline(…)"


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


class Mesh(Protocol):
    """The ranks of a pipeline and its replicas: see ``taktline.train.ranks.Ranks``."""

    @property
    def transport(self) -> Transport: ...

    def agreed(
        self,
        error: TaktlineError | None,
        what: str,
        numbers: Callable[[str], Sequence[int]],
        difference: Callable[[str, Transport, list[list[int]]], str | None],
    ) -> TaktlineError | None: ...


def together(ranks: Mesh, make: Callable[[], T], compared: Callable[[T], Compared]) -> T:
    """What a function returns, if it works on all ranks of all replicas, and these compare alike.

    Otherwise all of them raise; a rank with an error of its own raises that one.
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
