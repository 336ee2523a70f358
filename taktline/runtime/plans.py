"""A plan made ready: lowered for training, and its forwards alone for evaluation."""

from __future__ import annotations

import warnings
from functools import cached_property

import numpy as np

from taktline.checks import warn
from taktline.plan import Kind, Level, Plan, lower, require_valid, restrict, validate
from taktline.plan.rows import Rows

__all__ = ["Runnable"]

KEEP_READY = 3
"""How many of a rank's sharded stages are gathered at a time, where a plan does not say."""


class Runnable:
    """What a rank needs of a plan; every plan that runs was validated.

    Args:
        plan: the plan.
        shards: whether stages are to be gathered before they compute, on whatever rank.
        reduces: whether gradients are to be averaged over replicas, likewise.

    Where these need actions and the plan has none of theirs, they are added.

    >>> from taktline.plan import build
    >>> runnable = Runnable(build("1f1b", ranks=2, microbatches=2))
    >>> " ".join(map(str, runnable.forward_only[1]))
    '1RECV_F0 1RECV_F1 1F0 1F1'
    """

    def __init__(self, plan: Plan, *, shards: bool = False, reduces: bool = False) -> None:
        require_valid(plan)
        self.plan = plan
        self.fingerprint = int(plan.digest()[:15], 16)
        self._shards = shards
        self._reduces = reduces
        if not self.sends_may_wait:
            warn(
                f"plan {plan.name!r} can deadlock where a send waits until its receive is posted: "
                f"{validate(plan)[0]}. It runs with sends that do not wait; leave out its SEND and "
                "RECV, and safe ones are added"
            )

    def with_wrapped(self, *, shards: bool, reduces: bool) -> Runnable:
        """The same plan for stages that are wrapped."""
        if (shards, reduces) == (self._shards, self._reduces):
            return self
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to say was said
            return Runnable(self.plan, shards=shards, reduces=reduces)

    @cached_property
    def sends_may_wait(self) -> bool:
        """Whether it goes on even where every send waits until its receive is posted."""
        return self.plan.level < Level.LOWERED or not validate(self.plan)

    def program(self, microbatches: int, *, trains: bool) -> Plan:
        """What runs: for a batch with fewer rows than micro-batches, the first of these."""
        return restrict(self.lowered if trains else self.forward_only, microbatches)

    @cached_property
    def lowered(self) -> Plan:
        """The plan with its messages, and all that its stages need."""
        plan = self.plan
        shards = self._shards and not plan.has(Kind.UNSHARD, Kind.RESHARD)
        reduces = self._reduces and not plan.has(Kind.REDUCE_GRAD)
        if plan.level == Level.COMPUTE:
            return lower(plan, keep_ready=KEEP_READY if shards else None, reduce=reduces)
        if shards or reduces:
            by_rank = [plan.rows_of(rank) for rank in range(plan.ranks)]
            plan = plan.with_rows([_wrapped(rows, shards, reduces) for rows in by_rank], plan.level)
        return lower(plan)

    @cached_property
    def forward_only(self) -> Plan:
        """Its forwards, in its order, with their messages."""
        by_rank = [self.plan.rows_of(rank) for rank in range(self.plan.ranks)]
        plan = self.plan.with_rows([_forwards(rows) for rows in by_rank], Level.COMPUTE)
        return lower(plan, keep_ready=KEEP_READY if self._shards else None)


def _forwards(rows: Rows) -> Rows:
    kept = rows[rows.kind == Kind.F]
    return Rows.of(kept.kind, kept.stage, kept.microbatch)


def _wrapped(rows: Rows, shards: bool, reduces: bool) -> Rows:
    """Rows of any level, with each stage gathered from its first to its last computation."""
    second, joined = rows.second_of_pair(), rows.joined
    kinds: list[int] = []
    stages: list[int] = []
    anchors: list[float] = []
    computes = rows.kind <= Kind.W
    for stage in np.unique(rows.stage[computes]).tolist():
        at = np.flatnonzero(computes & (rows.stage == stage))
        # Around a pair, not into it.
        first, last = at[0] - int(second[at[0]]), at[-1] + int(joined[at[-1]])
        added = [(Kind.UNSHARD, first - 0.5), (Kind.RESHARD, last + 0.5)] if shards else []
        if reduces and np.isin(rows.kind[at], (Kind.B, Kind.W)).any():
            added.append((Kind.REDUCE_GRAD, last + 0.25))
        for kind, anchor in added:
            kinds.append(kind)
            stages.append(stage)
            anchors.append(float(anchor))
    order = np.argsort(np.concatenate([np.arange(len(rows)), anchors]), kind="stable")
    return Rows.concatenate([rows, Rows.of(np.array(kinds), np.array(stages))])[order]
