"""Merge I and W into B where nothing runs between them."""

from __future__ import annotations

import numpy as np

from taktline.checks import require_instance
from taktline.plan.action import Kind
from taktline.plan.plan import Plan
from taktline.plan.rows import Rows

__all__ = ["merge_backward"]


def merge_backward(plan: Plan) -> Plan:
    """Replace each I that is directly followed by its own W with one B: the same work, cheaper.

    >>> from taktline.plan import Plan
    >>> merge_backward(Plan.from_actions([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]]))[0]
    [Action(0F0), Action(0F1), Action(0B0), Action(0B1)]
    """
    require_instance("plan", plan, Plan)
    return plan.with_rows([_merge(plan.rows_of(rank)) for rank in range(plan.ranks)], plan.level)


def _merge(rows: Rows) -> Rows:
    own_weights_follow = (
        (rows.kind[:-1] == Kind.I)
        & (rows.kind[1:] == Kind.W)
        & (rows.stage[:-1] == rows.stage[1:])
        & (rows.microbatch[:-1] == rows.microbatch[1:])
        & ~rows.second_of_pair()[:-1]
    )
    at = np.flatnonzero(own_weights_follow)
    kind = rows.kind.copy()
    kind[at] = Kind.B
    return Rows(kind, rows.stage, rows.microbatch, rows.joined)[_without(len(rows), at + 1)]


def _without(length: int, rows: np.ndarray) -> np.ndarray:
    keep = np.ones(length, np.bool_)
    keep[rows] = False
    return keep
