"""From a compute plan to one that can run: pure passes Plan → Plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taktline.checks import check, check_list
from taktline.errors import PlanError
from taktline.plan.action import Kind
from taktline.plan.deps import channels
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import FloatArray, IntArray, Rows
from taktline.plan.validate import require_valid
from taktline.plan.walk import Walk, unit_run
from taktline.text import counted


def lower(
    plan: Plan,
    *,
    merge: bool = False,
    keep_ready: int | None = None,
    ahead: Sequence[int] | None = None,
    reduce: bool = False,
) -> Plan:
    """A plan that is ready to run, by these passes in this order.

    Args:
        plan: the plan; it stays as it is.
        merge: join each I that is directly followed by its W into one B.
        keep_ready: gather and release sharded parameters, so many stages ahead (None: not sharded).
        ahead: for each rank, how many of these are gathered in advance; all of them by default.
        reduce: reduce each stage's gradients over the data-parallel ranks once they are complete.

    Last, every SEND and RECV is added.

    >>> from taktline.plan import build
    >>> " ".join(map(str, lower(build("gpipe", ranks=2, microbatches=1))[1]))
    '1RECV_F0 1F0 1B0 1SEND_B0'
    """
    if check("merge", merge, bool):
        plan = merge_backward(plan)
    if keep_ready is not None:
        plan = add_shard(plan, keep_ready, ahead)
    if check("reduce", reduce, bool):
        plan = add_reduce(plan)
    return add_comm(plan)


def merge_backward(plan: Plan) -> Plan:
    """Replace each I that is directly followed by its own W with one B: the same work, cheaper.

    >>> from taktline.plan import Plan
    >>> merge_backward(Plan.from_actions([["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]]))[0]
    [Action(0F0), Action(0F1), Action(0B0), Action(0B1)]
    """
    check("plan", plan, Plan)
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
    merged = Rows(kind, rows.stage, rows.microbatch, rows.joined)
    return merged[np.delete(np.arange(len(rows)), at + 1)]


def add_shard(plan: Plan, keep_ready: int = 3, ahead: Sequence[int] | None = None) -> Plan:
    """Add UNSHARD and RESHARD so that the next ``keep_ready`` stages in use are gathered.

    With ``ahead``, a number for each rank, only so many of them are gathered in advance; the others
    stay gathered if they are.

    >>> from taktline.plan import Plan
    >>> plan = Plan.from_actions([["0F0", "1F0", "1B0", "0B0"]])
    >>> " ".join(map(str, add_shard(plan, keep_ready=1)[0]))
    '0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD'
    """
    check("plan", plan, Plan)
    keep_ready = check("keep_ready", keep_ready, int, least=1, error=PlanError)
    if plan.level != Level.COMPUTE:
        raise PlanError(
            f"add_shard needs a COMPUTE plan, this one is {plan.level.name}; apply it once, first"
        )
    given = [keep_ready] * plan.ranks if ahead is None else ahead
    ahead = check_list("ahead", given, int, error=PlanError)
    if len(ahead) != plan.ranks:
        raise PlanError(f"ahead has {len(ahead)} numbers, but the plan has {plan.ranks} ranks")
    for rank, number in enumerate(ahead):
        check(f"ahead[{rank}]", number, int, least=1, most=keep_ready, error=PlanError)
    by_rank = [_shard(plan.rows_of(rank), keep_ready, n) for rank, n in enumerate(ahead)]
    return plan.with_rows(by_rank, Level.SHARDED)


def _shard(rows: Rows, keep_ready: int, ahead: int) -> Rows:
    kinds: list[int] = []
    stages: list[int] = []
    anchors: list[int] = []
    held: list[int] = []
    computes = np.flatnonzero(rows.kind <= Kind.W)  # a copy needs no parameters
    at = np.append(computes, len(rows)).tolist()
    for row, wanted, soon in _changes(rows[computes], keep_ready, ahead):
        release = sorted(set(held) - set(wanted))
        gather = [stage for stage in wanted[:soon] if stage not in held]
        kinds += [Kind.RESHARD] * len(release) + [Kind.UNSHARD] * len(gather)
        stages += release + gather
        anchors += [at[row]] * (len(release) + len(gather))
        held = [stage for stage in (*held, *gather) if stage in wanted]
    anchor = np.concatenate([np.array(anchors, np.int64), np.arange(len(rows))])
    order = np.argsort(anchor, kind="stable")
    return Rows.concatenate([Rows.of(np.array(kinds), np.array(stages)), rows])[order]


def _changes(rows: Rows, keep_ready: int, ahead: int) -> list[tuple[int, list[int], int]]:
    """(row, stages wanted from there on, how many of them soon), wherever that changes.

    At the end none is wanted.

    Read from the back: a stage that is used moves to the front of the queue of next uses.
    """
    second = rows.second_of_pair().tolist()
    joined = rows.joined.tolist()
    stage = rows.stage.tolist()
    queue: list[int] = []
    changes: list[tuple[int, list[int], int]] = [(len(rows), [], 0)]
    for row in range(len(rows) - 1, -1, -1):
        if queue[:1] != [stage[row]]:
            if stage[row] in queue:
                queue.remove(stage[row])
            queue.insert(0, stage[row])
        if second[row]:
            continue
        # Both stages of a pair are in use at once, whatever the number to keep ready.
        pair = joined[row] and stage[row] != stage[row + 1]
        least = 2 if pair else 1
        wanted, soon = queue[: max(keep_ready, least)], max(ahead, least)
        _, later, later_soon = changes[-1]
        same = sorted(wanted) == sorted(later)
        if same and sorted(wanted[:soon]) == sorted(later[:later_soon]):
            changes[-1] = (row, wanted, soon)
        else:
            changes.append((row, wanted, soon))
    return changes[::-1]


def add_reduce(plan: Plan) -> Plan:
    """Add REDUCE_GRAD after each stage's last B or W.

    >>> from taktline.plan import Plan
    >>> plan = Plan.from_actions([["0F0", "1F0", "1B0", "0B0"]])
    >>> " ".join(map(str, add_reduce(plan)[0]))
    '0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD'
    """
    check("plan", plan, Plan)
    if plan.level == Level.LOWERED or plan.has(Kind.REDUCE_GRAD):
        raise PlanError(
            "add_reduce needs a plan without REDUCE_GRAD, SEND and RECV; apply it once, and before "
            "add_comm"
        )
    by_rank = [_reduce(plan.rows_of(rank)) for rank in range(plan.ranks)]
    return plan.with_rows(by_rank, Level.SHARDED)


def _reduce(rows: Rows) -> Rows:
    backward = np.flatnonzero(np.isin(rows.kind, (Kind.B, Kind.W)))
    stages, from_behind = np.unique(rows.stage[backward][::-1], return_index=True)
    last = backward[::-1][from_behind]
    order = np.argsort(np.concatenate([np.arange(len(rows)), last]), kind="stable")
    return Rows.concatenate([rows, Rows.of(np.full(len(stages), Kind.REDUCE_GRAD), stages)])[order]


def add_comm(plan: Plan) -> Plan:
    """Add a SEND after each action whose result another rank needs, and its RECV there.

    ::

        rank 0 │ 0F0 0SEND_F0 …           rank 0 │ … 0RECV_B0 … 0B0
        rank 1 │ 1RECV_F0 … 1F0           rank 1 │ 1B0 1SEND_B0 …

    The messages are placed along one run of the plan at unit cost. A receive is posted before the
    action that its rank runs when the message is sent: early enough to overlap, late enough to keep
    no idle buffer. All posts, sends and computations follow one order in time, so that not even
    sends that block until their receive is posted can deadlock. Posts of one channel keep the order
    of its sends.

    >>> from taktline.plan import build
    >>> " ".join(map(str, add_comm(build("1f1b", ranks=2, microbatches=2))[1]))
    '1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1'
    """
    require_valid(plan)
    if plan.level == Level.LOWERED:
        return plan
    rows, rank = plan.rows, plan.rank_of_rows()
    run = unit_run(plan)
    sources = np.flatnonzero(channels(plan) >= 0)
    moment = run.arrival[sources]
    forward = rows.kind[sources] == Kind.F
    stage, microbatch = rows.stage[sources], rows.microbatch[sources]
    peer_stage = np.where(forward, stage + 1, stage - 1)
    sends = Rows.of(np.where(forward, Kind.SEND_F, Kind.SEND_B), stage, microbatch)
    receives = Rows.of(np.where(forward, Kind.RECV_F, Kind.RECV_B), peer_stage, microbatch)
    receiver = np.array(plan.placement.rank_of)[peer_stage]

    # A receive is before one of the plan's rows, a send after its whole source.
    in_front_of = _under_way(plan, receiver, moment, run)
    behind = sources + rows.joined[sources]
    anchor = np.concatenate([in_front_of, np.arange(len(rows)), behind])
    turn = np.repeat(np.array([0, 1, 2], np.int8), [len(sources), len(rows), len(sources)])
    time = np.concatenate([moment, np.zeros(len(rows)), moment])
    order = np.lexsort((time, turn, anchor))
    lowered = Rows.concatenate([receives, rows, sends])[order]
    cuts = np.searchsorted(
        np.concatenate([receiver, rank, rank[sources]])[order], np.arange(plan.ranks + 1)
    )
    result = plan.with_rows(
        [lowered[cuts[r] : cuts[r + 1]] for r in range(plan.ranks)], Level.LOWERED
    )
    # The global order along which all this was placed, as whole numbers: three turns a unit of
    # time, in which sends come first, then receives, then computations.
    computes = rows.kind <= Kind.W
    posted = np.minimum(3 * run.start[in_front_of] + 1, 3 * moment - 1)
    result.known["order"] = np.concatenate([posted, 3 * run.start + 2 * computes, 3 * moment])[
        order
    ]
    return result


def _under_way(plan: Plan, receiver: IntArray, moment: FloatArray, run: Walk) -> IntArray:
    """The receiver's action that is under way, or just done, at a moment; if idle, its next."""
    actions = np.flatnonzero((plan.rows.kind <= Kind.W) & ~plan.rows.second_of_pair())
    # One number for (rank, time), so that one search serves all ranks: a rank's actions end in
    # order, and the first that has not ended before the moment is the one.
    rank, step = plan.rank_of_rows()[actions], run.arrival.max(initial=0.0) + 1.0
    ends: FloatArray = run.arrival[actions] + rank * step
    moments: FloatArray = moment + receiver * step
    return actions[np.searchsorted(ends, moments)]


def restrict(plan: Plan, microbatches: int) -> Plan:
    """Leave out every micro-batch but the first ones; the other actions stay, in their order.

    No action waits for more than before, so a valid plan stays valid. Of an overlapped pair one
    half may be left. Actions without a micro-batch (UNSHARD, RESHARD, REDUCE_GRAD) stay, so that
    replicas with batches of different sizes gather and reduce in the same order.

    >>> from taktline.plan import build
    >>> " ".join(map(str, restrict(build("1f1b", ranks=2, microbatches=8), 2)[0]))
    '0F0 0F1 0B0 0B1'
    """
    if not 1 <= microbatches <= plan.microbatches:
        raise PlanError(
            f"plan {plan.name!r} has {counted(plan.microbatches, 'micro-batch')}; it can be "
            f"restricted to 1 up to {plan.microbatches} of them, not {microbatches}"
        )
    if microbatches == plan.microbatches:
        return plan
    by_rank = [plan.rows_of(rank).before(microbatches) for rank in range(plan.ranks)]
    result = Plan(by_rank, plan.placement, microbatches, level=plan.level, name=plan.name)
    order = plan.known.get("order")
    if isinstance(order, np.ndarray):
        # The order that proves a lowered plan free of deadlock proves its parts, too.
        result.known["order"] = order[plan.rows.microbatch < microbatches]
    return result
