"""Who holds a tied weight: what the ranks tell each other before the first step."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from taktline.errors import MismatchError
from taktline.meta import TensorMeta
from taktline.sharding import Sharding, is_sharded
from taktline.stage import PipelineStage, Tie
from taktline.stage.names import named_parameters

__all__ = ["Holders", "Use", "holders_of", "untied"]

_PROCESS = secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Use:
    """A tied weight in one stage."""

    tie: Tie
    stage: int
    look: str
    """Shape, type and shards."""
    identity: str
    """The parameter itself: local ranks may hold one and the same."""

    @classmethod
    def of(cls, tie: Tie, stage: PipelineStage) -> Use:
        """How a stage holds a weight; raises if it does not."""
        name = tie.name_in(stage.stage_index)
        parameter = named_parameters(stage.submod).get(name or "")
        if parameter is None:
            raise MismatchError(
                f"stage {stage.stage_index} has no parameter {name}, which its ties name: {tie}"
            )
        shards = f" {Sharding.of(parameter).placements}" if is_sharded(parameter) else ""
        return cls(
            tie,
            stage.stage_index,
            f"{TensorMeta(tuple(parameter.shape), parameter.dtype)}{shards}",
            # With the number of the process: one that is forked has all else in common.
            f"{_PROCESS}-{os.getpid()}-{id(parameter)}",
        )

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Use:
        """From the wire."""
        return cls(**{**plain, "tie": Tie(dict(plain["tie"]["uses"]))})

    def to_plain(self) -> dict[str, Any]:
        """For the wire."""
        return asdict(self)


def untied(uses: Sequence[Use]) -> str | None:
    """Why the uses that all ranks tell of are not one weight each; None if they are."""
    found = {(use.tie, use.stage): use.look for use in uses}
    for tie in dict.fromkeys(use.tie for use in uses):
        for stage in tie.stages:
            if (tie, stage) not in found:
                return (
                    f"{tie}: these are tied, but stage {stage} does not know of it; give each of "
                    "the stages the same ties="
                )
        looks = {stage: found[tie, stage] for stage in tie.stages}
        if len(set(looks.values())) > 1:
            told = ", ".join(f"{look} in stage {stage}" for stage, look in looks.items())
            return f"{tie}: these are tied, but differ: {told}; tie weights that are the same"
    return None


@dataclass(frozen=True, slots=True)
class Holders:
    """The copies of a tied weight: for each rank that holds some, a stage for each copy.

    The rank of the first stage comes first: it keeps the sum.
    """

    tie: Tie
    stages_of: dict[int, list[int]]

    @property
    def owner(self) -> int:
        """The rank of the first stage."""
        return next(iter(self.stages_of))

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return list(self.stages_of)[1:]


def holders_of(ranks: Sequence[Sequence[Use]]) -> list[Holders]:
    """Those weights of which there are several copies.

    A parameter that several stages, or several local ranks, hold is one copy.
    """
    found: dict[Tie, dict[int, list[int]]] = {}
    seen: set[tuple[Tie, str]] = set()
    told = [(use, rank) for rank, uses in enumerate(ranks) for use in uses]
    for use, rank in sorted(told, key=lambda pair: pair[0].stage):
        if (use.tie, use.identity) not in seen:
            seen.add((use.tie, use.identity))
            found.setdefault(use.tie, {}).setdefault(rank, []).append(use.stage)
    return [
        Holders(tie, stages_of)
        for tie, stages_of in found.items()
        if sum(map(len, stages_of.values())) > 1
    ]
