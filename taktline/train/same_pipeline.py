"""All ranks of all replicas build the same pipeline, or all of them raise why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar, cast

from torch import nn

from taktline.errors import MismatchError, TaktlineError, text_of
from taktline.plan import Plan
from taktline.runtime.same_model import difference, digest
from taktline.stage.blueprint import OPTION, Blueprint, attached, blueprint
from taktline.train.ranks import RANK, REPLICA, Ranks
from taktline.transport import Transport
from taktline.transport.exchange import retold

T = TypeVar("T")

BUILDING = "Pipeline(…)"


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
    rank_of: Sequence[int] = ()
    """The rank of each stage."""

    @classmethod
    def of(
        cls, plan: Plan, modules: Mapping[int, nn.Module], *, seed: int | None, **options: object
    ) -> Self:
        """Of a plan and all stages, or those of one rank."""
        told = {
            "schedule": plan.name,
            "microbatches": plan.microbatches,
            "number of stages": plan.stages,
            **options,
            "plan": plan.digest()[:8],
        }
        model = attached(modules[min(modules)]) if plan.stages > 1 else ()
        whole = len(modules) == plan.stages
        return cls(
            tuple((OPTION, name, str(value)) for name, value in told.items()),
            ((OPTION, "seed", str(seed)),),
            model,
            model if model and whole else blueprint(modules),
            plan.placement.rank_of,
        )

    def along(self, noun: str) -> Blueprint:
        """What ranks along a dimension of the mesh must have in common."""
        if noun == RANK:
            return *self.options, *self.seed, *self.model
        # Ranks of other dimensions may hold other parts of a stage.
        return *self.options, *(self.stages if noun == REPLICA else ())

    def difference(self, noun: str, transport: Transport, rows: list[list[int]]) -> str | None:
        """The first difference between two of them, in words."""
        digests, rank_of = [number for (number,) in rows], self.rank_of if noun == RANK else ()
        return difference(transport, self.along(noun), digests, rank_of=rank_of, noun=noun)


def together(ranks: Ranks, make: Callable[[], T], compared: Callable[[T], Compared]) -> T:
    """What a function returns, if it works on all ranks of all replicas, and these compare alike.

    Otherwise all of them raise; a rank with an error of its own raises that one.
    """
    made, mine, error = None, Compared(), None
    try:
        made = make()
        mine = compared(made)
    except Exception as raised:  # of the user's code, too
        error = raised
    told = None if error is None else _told(error, ranks.transport)
    elsewhere = ranks.agreed(
        told, BUILDING, lambda noun: [digest(mine.along(noun))], mine.difference
    )
    if error is not None:
        raise error
    if elsewhere is not None:
        raise elsewhere
    return cast("T", made)


def _told(error: Exception, transport: Transport) -> TaktlineError:
    """The error for other ranks."""
    rank = f"rank {transport.rank}: "
    if isinstance(error, TaktlineError):
        return retold(error, f"{rank}{text_of(error)}")
    return MismatchError(f"{rank}{type(error).__name__}: {text_of(error)}")
