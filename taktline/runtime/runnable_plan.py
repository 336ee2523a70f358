"""A plan ready to run: lowered for training, or its forwards; all ranks in one order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from taktline.checks import check, warn
from taktline.errors import ScheduleError
from taktline.plan import Kind, Level, Plan, lower, require_valid, restrict, validate
from taktline.plan.rows import FloatArray, Rows
from taktline.plan.walk import unit_run

_OF_WRAPPED = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
_SAVING = (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD)
_MESSAGES = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rank may hold at a time, where a plan does not say."""

    max_active_stages: int = 3
    """How many of a rank's sharded stages are gathered."""
    unshard_lookahead: str | tuple[int, ...] = "full"
    """How many of them are gathered in advance: "full" is all, "auto" one more on each rank."""
    max_outstanding_sends: int | None = None
    """How many messages of a rank may be under way, before the next one waits; None: any number."""

    def __post_init__(self) -> None:
        most, ahead, sends = self.max_active_stages, self.unshard_lookahead, "max_outstanding_sends"
        check("max_active_stages", most, int, least=1, error=ScheduleError)
        if self.max_outstanding_sends is not None:
            check(sends, self.max_outstanding_sends, int, least=0, error=ScheduleError)
        if ahead not in ("full", "auto") and not isinstance(ahead, tuple):
            raise ScheduleError(
                "unshard_lookahead must be 'full', 'auto', or a tuple of a whole number for each "
                f"rank, got {ahead!r}"
            )
        for rank, number in enumerate(() if isinstance(ahead, str) else ahead):
            name = f"unshard_lookahead[{rank}]"
            check(name, number, int, least=1, most=most, error=ScheduleError)

    def ahead(self, ranks: int) -> list[int]:
        """For each rank, how many stages are gathered in advance.

        >>> Limits(4, "auto").ahead(4)
        [2, 3, 4, 4]
        """
        most, given = self.max_active_stages, self.unshard_lookahead
        if isinstance(given, str):
            return [most if given == "full" else min(rank + 2, most) for rank in range(ranks)]
        if len(given) != ranks:
            raise ScheduleError(
                "unshard_lookahead tuple length must equal the pipeline degree "
                f"({ranks}), got {len(given)}"
            )
        return [*given]


class Runnable:
    """A valid plan, lowered for the stages that run it.

    >>> from taktline.plan import build
    >>> runnable = Runnable(build("1f1b", ranks=2, microbatches=2))
    >>> " ".join(map(str, runnable.forward_only[1]))
    '1RECV_F0 1RECV_F1 1F0 1F1'
    """

    def __init__(self, plan: Plan, limits: Limits = Limits()) -> None:  # noqa: B008
        require_valid(plan)
        self.limits = limits
        self._ahead = limits.ahead(plan.ranks)
        self.plan = plan
        self._shards = self.reduces = False
        self._check_sends()
        if not self.sends_may_wait:
            warn(
                f"plan {plan.name!r} can deadlock where a send waits until its receive is posted: "
                f"{validate(plan)[0]}. It runs with sends that do not wait; leave out its SEND and "
                "RECV, and safe ones are added"
            )

    def _check_sends(self) -> None:
        """Raise if no order of waits can keep the number of messages that may be under way."""
        most = self.limits.max_outstanding_sends
        if most is None or (most and self.sends_may_wait):
            return
        if len(set(self.plan.placement.rank_of)) > 1:
            raise ScheduleError(
                f"Cannot satisfy max_outstanding_sends={most} for plan {self.plan.name!r}: a send "
                + ("waits for one before its receive is posted" if most else "is one message")
                + "; increase the limit, or leave out the SEND and RECV of the plan"
            )

    def wrap(self, *, shards: bool, reduces: bool) -> None:
        """Before a first step: add the actions of wrapped stages, unless the plan has its own.

        ``shards`` is whether stages of any rank are gathered before they compute, ``reduces``
        whether some average gradients over replicas.
        """
        self._shards, self.reduces = shards, reduces
        for kind, needs in {Kind.UNSHARD: shards, Kind.REDUCE_GRAD: reduces}.items():
            if needs and self.plan.has(*_OF_WRAPPED) and not self.plan.has(kind):
                raise ScheduleError(
                    f"plan {self.plan.name!r} has no {kind.name}, which wrapped stages need; add "
                    "it, or leave out UNSHARD, RESHARD and REDUCE_GRAD, and all are added for you"
                )

    @cached_property
    def sends_may_wait(self) -> bool:
        """Whether the plan cannot deadlock where every send waits until its receive is posted."""
        return self.plan.level < Level.LOWERED or not validate(self.plan)

    def program(self, microbatches: int, *, trains: bool) -> Plan:
        """The plan of a step; a batch with few rows runs the first micro-batches."""
        return restrict(self.lowered if trains else self.forward_only, microbatches)

    @cached_property
    def lowered(self) -> Plan:
        """The plan with its messages, and the actions of wrapped stages."""
        plan = self.plan
        if (self._shards or self.reduces) and not plan.has(*_OF_WRAPPED):
            by_rank = [plan.rows_of(rank) for rank in range(plan.ranks)]
            plan = plan.with_rows(
                [rows[rows.kind < Kind.SEND_F] for rows in by_rank], Level.COMPUTE
            )
        if plan.level > Level.COMPUTE:
            return lower(plan)
        return self._lowered(plan, reduces=self.reduces)

    @cached_property
    def forward_only(self) -> Plan:
        """The forwards in the plan's order, with their messages."""
        by_rank = [self.plan.rows_of(rank) for rank in range(self.plan.ranks)]
        forwards = [rows[rows.kind == Kind.F] for rows in by_rank]
        plain = [Rows.of(rows.kind, rows.stage, rows.microbatch) for rows in forwards]
        plan = self.plan.with_rows(plain, Level.COMPUTE)
        return self._lowered(plan, reduces=False)

    def _lowered(self, plan: Plan, *, reduces: bool) -> Plan:
        keep_ready = self.limits.max_active_stages if self._shards else None
        return lower(plan, keep_ready=keep_ready, ahead=self._ahead, reduce=reduces)


def merged(plan: Plan) -> Rows:
    """The rows of all ranks in one order, without messages; computed once for a plan.

    In the order of their times, if every F, I and W takes as long as any other; those of a later
    rank first, so that values are taken before the next ones are made::

        rank 0   F0    F1                         B0 B1
        rank 1      F0       F1             B0 B1
        rank 2            F0    F1    B0 B1

    >>> from taktline.plan import build, lower
    >>> rows = merged(lower(build("gpipe", ranks=3, microbatches=2)))
    >>> " ".join(map(str, rows.actions()))
    '0F0 1F0 0F1 2F0 1F1 2F1 2B0 2B1 1B0 1B1 0B0 0B1'
    """
    if "merged" not in plan.known:
        rows = plan.rows[np.lexsort((-plan.rank_of_rows(), _starts(plan)))]
        rows = rows[~np.isin(rows.kind, _MESSAGES)]
        plan.known["merged"] = Rows.of(rows.kind, rows.stage, rows.microbatch)
    return cast(Rows, plan.known["merged"])


def _starts(plan: Plan) -> FloatArray:
    """When each row starts, as in the plan that saves no memory: so numbers are added in its order.

    Copies start right after the row before them, and a forward runs again right before the next.
    """
    others = ~np.isin(plan.rows.kind, _SAVING)
    if others.all():
        return unit_run(plan).start
    kept = np.flatnonzero(others)
    by_rank = [plan.rows_of(rank) for rank in range(plan.ranks)]
    by_rank = [rows[~np.isin(rows.kind, _SAVING)] for rows in by_rank]
    start = unit_run(plan.with_rows(by_rank, plan.level)).start
    place = np.searchsorted(kept, np.arange(len(plan.rows)))
    return start[np.where(others | (plan.rows.kind == Kind.RECOMPUTE), place, place - 1)]
