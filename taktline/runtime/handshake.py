"""The handshake of a schedule's ranks before its first step, and why they do not fit together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from taktline.checks import read
from taktline.meta import Signature
from taktline.plan import Placement
from taktline.runtime.agreement import differs
from taktline.runtime.ties import TieUse, untied
from taktline.text import by_rank, counted
from taktline.transport.describe import decode, encode


@dataclass(frozen=True, slots=True)
class Handshake:
    """One rank's part of a schedule, shared once before its first step."""

    schedule: str
    microbatches: int
    num_stages: int
    stages: list[int]
    rank_of: list[int]
    """The process of each stage, by the plan."""
    plan: str
    """The plan's digest."""
    trains: bool
    dynamic_shapes: bool
    run_ahead: bool = False
    shards: bool = False
    """Whether a stage is gathered before it computes."""
    reduces: bool = False
    """Whether a stage averages its gradients over replicas."""
    entangled: bool = False
    """Whether processes outside of the pipeline take part in the work of its stages."""
    takes: list[tuple[int, str]] = field(default_factory=list)
    """The input of each stage with an example, as text."""
    gives: list[tuple[int, str]] = field(default_factory=list)
    """The output of each stage with an example, as text."""
    ties: list[TieUse] = field(default_factory=list)
    """The tied weights in the rank's stages."""
    model: int = 0
    """A digest of the model that the stages were cut from; 0 if it is not known."""
    number: int = 1
    """The number that the rank proposes for the schedule; that of rank 0 counts."""

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Handshake:
        """From JSON, checked."""
        plain = read(text, _SCHEMA, what="what a rank says of itself")
        return cls(**{**plain, "ties": [TieUse.from_plain(use) for use in plain["ties"]]})


_SCHEMA = {
    "number": int,
    "model": int,
    "schedule": str,
    "microbatches": int,
    "num_stages": int,
    "stages": [int],
    "rank_of": [int],
    "plan": str,
    "trains": bool,
    "dynamic_shapes": bool,
    "run_ahead": bool,
    "shards": bool,
    "reduces": bool,
    "entangled": bool,
    "takes": [(int, str)],
    "gives": [(int, str)],
    "ties": [{"tie": {"uses": [(int, str)]}, "stage": int, "kind": str, "identity": str}],
}


def examples(given: Mapping[int, Signature | None]) -> list[tuple[int, str]]:
    """The examples that a user has given for stages, as texts."""
    return [(stage, encode(example).decode()) for stage, example in given.items() if example]


def misfit(ranks: Sequence[Handshake]) -> str | None:
    """Why these ranks cannot run a schedule together; None if they can.

    All ranks see the same handshakes, so all return the same.
    """
    for name, noun in (
        ("schedule", "schedule"),
        ("microbatches", "number of micro-batches"),
        ("num_stages", "number of stages"),
        ("trains", "presence of a loss_fn"),
        ("dynamic_shapes", "value of dynamic_shapes"),
        ("run_ahead", "value of run_ahead"),
    ):
        if reason := differs(noun, [getattr(rank, name) for rank in ranks]):
            return f"{reason}; pass the same on every rank"
    reason = (
        _misplaced([rank.stages for rank in ranks], ranks[0].rank_of)
        or _misshaped(ranks)
        or untied([use for rank in ranks for use in rank.ties])
    )
    if reason is None and differs("plan", [rank.plan for rank in ranks]):
        groups = by_rank([rank.plan[:8] for rank in ranks])
        return f"the ranks have different plans: {groups}; build or read the same plan on each"
    return reason


def _misshaped(ranks: Sequence[Handshake]) -> str | None:
    """Where the examples of two neighbouring stages do not fit together."""
    takes = {stage: (r, text) for r, rank in enumerate(ranks) for stage, text in rank.takes}
    gives = {stage: (r, text) for r, rank in enumerate(ranks) for stage, text in rank.gives}
    for stage in sorted(gives.keys() & {stage - 1 for stage in takes}):
        (giver, given), (taker, taken) = gives[stage], takes[stage + 1]
        output, expected = decode(given.encode()), decode(taken.encode())
        if difference := expected.difference(output.leaves, output.spec, is_example=True):
            return (
                f"stage {stage} on rank {giver} has {output} (output_args), but stage {stage + 1} "
                f"on rank {taker} takes {expected} (input_args): {difference}"
            )
    return None


def _misplaced(held: Sequence[Sequence[int]], rank_of: Sequence[int]) -> str | None:
    """Where ranks hold other stages than the plan places there."""
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
        else f"stage {stage} exists {len(ranks)} times: on rank {_listed(ranks)}"
        for stage, ranks in holders.items()
        if len(ranks) != 1
    ]
    if not words:
        words = ["the stages are not where the schedule runs them"]
    needs = "; ".join(
        f"rank {rank} has {_stages(has)} and needs {_stages(needs)}"
        for rank, (has, needs) in enumerate(zip(held, wanted, strict=True))
        if sorted(has) != needs
    )
    return f"{'; '.join(words)}. {needs[0].upper()}{needs[1:]}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _stages(stages: Sequence[int]) -> str:
    return f"{counted(len(stages), 'stage')} ({_listed(stages)})" if stages else "no stage"
