"""A plan made ready: lowered for training, and its forwards alone for evaluation."""

from __future__ import annotations

import warnings
from functools import cached_property

from taktline.plan import Kind, Level, Plan, lower, require_valid, validate
from taktline.plan.rows import Rows

__all__ = ["Runnable"]


class Runnable:
    """What a rank needs of a plan; every plan that runs was validated.

    >>> from taktline.plan import build
    >>> runnable = Runnable(build("1f1b", ranks=2, microbatches=2))
    >>> " ".join(map(str, runnable.forward_only[1]))
    '1RECV_F0 1RECV_F1 1F0 1F1'
    """

    def __init__(self, plan: Plan) -> None:
        require_valid(plan)
        self.plan = plan
        self.fingerprint = int(plan.digest()[:15], 16)
        if not self.sends_may_wait:
            warnings.warn(
                f"plan {plan.name!r} can deadlock where a send waits until its receive is posted: "
                f"{validate(plan)[0]}. It runs with sends that do not wait; leave out its SEND and "
                "RECV, and safe ones are added",
                stacklevel=2,
            )

    @cached_property
    def sends_may_wait(self) -> bool:
        """Whether it goes on even where every send waits until its receive is posted."""
        return self.plan.level < Level.LOWERED or not validate(self.plan)

    @cached_property
    def lowered(self) -> Plan:
        """The plan with its messages."""
        return lower(self.plan)

    @cached_property
    def forward_only(self) -> Plan:
        """Its forwards, in its order, with their messages."""
        by_rank = [self.plan.rows_of(rank) for rank in range(self.plan.ranks)]
        forwards = [_forwards(rows) for rows in by_rank]
        return lower(self.plan.with_rows(forwards, Level.COMPUTE))


def _forwards(rows: Rows) -> Rows:
    kept = rows[rows.kind == Kind.F]
    return Rows.of(kept.kind, kept.stage, kept.microbatch)
