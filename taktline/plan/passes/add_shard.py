"""Gather sharded parameters ahead of their use, and release them after it."""

from __future__ import annotations

import numpy as np

from taktline.checks import require_instance, require_whole
from taktline.errors import PlanError
from taktline.plan.action import Kind
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import Rows

__all__ = ["add_shard"]


def add_shard(plan: Plan, keep_ready: int = 3) -> Plan:
    """Add UNSHARD and RESHARD so that the next ``keep_ready`` stages in use are gathered.

    >>> from taktline.plan import Plan
    >>> plan = Plan.from_actions([["0F0", "1F0", "1B0", "0B0"]])
    >>> " ".join(map(str, add_shard(plan, keep_ready=1)[0]))
    '0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD'
    """
    require_instance("plan", plan, Plan)
    keep_ready = require_whole("keep_ready", keep_ready, least=1, error=PlanError)
    if plan.level != Level.COMPUTE:
        raise PlanError(
            f"add_shard needs a COMPUTE plan, this one is {plan.level.name}; apply it once, first"
        )
    by_rank = [_shard(plan.rows_of(rank), keep_ready) for rank in range(plan.ranks)]
    return plan.with_rows(by_rank, Level.SHARDED)


def _shard(rows: Rows, keep_ready: int) -> Rows:
    kinds: list[int] = []
    stages: list[int] = []
    anchors: list[int] = []
    held: list[int] = []
    for row, wanted in _changes(rows, keep_ready):
        release = sorted(set(held) - set(wanted))
        gather = [stage for stage in wanted if stage not in held]
        kinds += [Kind.RESHARD] * len(release) + [Kind.UNSHARD] * len(gather)
        stages += release + gather
        anchors += [row] * (len(release) + len(gather))
        held = wanted
    anchor = np.concatenate([np.array(anchors, np.int64), np.arange(len(rows))])
    order = np.argsort(anchor, kind="stable")
    return Rows.concatenate([Rows.of(np.array(kinds), np.array(stages)), rows])[order]


def _changes(rows: Rows, keep_ready: int) -> list[tuple[int, list[int]]]:
    """(row, stages wanted from there on), wherever that changes; at the end none is wanted.

    Read from the back: a stage that is used moves to the front of the queue of next uses.
    """
    second = rows.second_of_pair().tolist()
    joined = rows.joined.tolist()
    stage = rows.stage.tolist()
    queue: list[int] = []
    changes: list[tuple[int, list[int]]] = [(len(rows), [])]
    for row in range(len(rows) - 1, -1, -1):
        if queue[:1] != [stage[row]]:
            if stage[row] in queue:
                queue.remove(stage[row])
            queue.insert(0, stage[row])
        if second[row]:
            continue
        # Both stages of a pair are in use at once, whatever the number to keep ready.
        pair = joined[row] and stage[row] != stage[row + 1]
        wanted = queue[: max(keep_ready, 2 if pair else 1)]
        if sorted(wanted) == sorted(changes[-1][1]):
            changes[-1] = (row, wanted)
        else:
            changes.append((row, wanted))
    return changes[::-1]
