"""Which ranks and stages hold a tied weight: shared by the ranks before the first step."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from taktline.errors import MismatchError
from taktline.meta import TensorMeta
from taktline.sharding import Sharding, is_sharded
from taktline.stage import PipelineStage, Tie
from taktline.stage.names import named_parameters

__all__ = ["TieHolders", "TieUse", "holders_of", "untied"]

_PROCESS = secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class TieUse:
    """A tied weight in one stage."""

    tie: Tie
    stage: int
    kind: str
    """Shape, type and shards, as text."""
    identity: str
    """The parameter object: local ranks may share one."""

    @classmethod
    def of(cls, tie: Tie, stage: PipelineStage) -> TieUse:
        """The use of a weight in a stage; raises if the stage does not have it."""
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
            # With the process number: a forked process has the same token and ids.
            f"{_PROCESS}-{os.getpid()}-{id(parameter)}",
        )

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> TieUse:
        """From what ``asdict`` returns."""
        return cls(**{**plain, "tie": Tie(dict(plain["tie"]["uses"]))})


def untied(uses: Sequence[TieUse]) -> str | None:
    """Why the uses of all ranks do not fit together; None if they do."""
    found = {(use.tie, use.stage): use.kind for use in uses}
    for tie in dict.fromkeys(use.tie for use in uses):
        for stage in tie.stages:
            if (tie, stage) not in found:
                return (
                    f"{tie}: these are tied, but not in the ties= of stage {stage}; pass the same "
                    "ties= to each of the stages"
                )
        kinds = {stage: found[tie, stage] for stage in tie.stages}
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{kind} in stage {stage}" for stage, kind in kinds.items())
            return f"{tie}: these are tied, but differ: {listed}; tie equal weights"
    return None


@dataclass(frozen=True, slots=True)
class TieHolders:
    """The copies of a tied weight."""

    tie: Tie
    stages_of: dict[int, list[int]]
    """By rank, a stage for each copy; the first rank adds up the gradients."""

    @property
    def owner(self) -> int:
        """The rank that adds up the gradients."""
        return next(iter(self.stages_of))

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return list(self.stages_of)[1:]


def holders_of(ranks: Sequence[Sequence[TieUse]]) -> list[TieHolders]:
    """The weights with several copies, from the uses of each rank.

    A parameter that several stages or local ranks share is one copy.
    """
    found: dict[Tie, dict[int, list[int]]] = {}
    seen: set[tuple[Tie, str]] = set()
    pairs = [(use, rank) for rank, uses in enumerate(ranks) for use in uses]
    for use, rank in sorted(pairs, key=lambda pair: pair[0].stage):
        if (use.tie, use.identity) not in seen:
            seen.add((use.tie, use.identity))
            found.setdefault(use.tie, {}).setdefault(rank, []).append(use.stage)
    return [
        TieHolders(tie, stages_of)
        for tie, stages_of in found.items()
        if sum(map(len, stages_of.values())) > 1
    ]
