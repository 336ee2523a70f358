"""The best plan for given costs, and what no plan can beat."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

import numpy as np

from taktline.checks import check, check_callable, check_one_of, refuse
from taktline.errors import CostError, PlanError, ScheduleError
from taktline.plan import solver as solvers
from taktline.plan.bound import Bound, lower_bound
from taktline.plan.costs import Costs
from taktline.plan.fit import Memory, fit_memory, limits_of
from taktline.plan.plan import Placement, Plan
from taktline.plan.portfolio import Progress, Search, fitting
from taktline.plan.rows import FloatArray
from taktline.plan.timeline import By, simulate
from taktline.plan.work import MARGIN, Work
from taktline.text import counted

Shape: TypeAlias = Literal["linear", "v", "looped"]


def bound(
    costs: Costs,
    *,
    ranks: int | None = None,
    microbatches: int,
    memory: Memory | None = None,
    placement: Placement | Shape = "linear",
    stages_per_rank: int = 2,
    seconds: float | None = None,
) -> Bound:
    """What no plan can beat with these costs, in this memory.

    The arguments are those of :func:`optimise`; where the costs name what saves memory, it is no
    limit. With ``seconds``, the solver tries for as long to
    prove more; it needs the extra ``taktline[solve]``.

    >>> bound(Costs(), ranks=4, microbatches=8).bubble_of_makespan
    0.1111111111111111
    """
    given = None if check("costs", costs, Costs, error=CostError).saves_memory else memory
    work = _work(costs, ranks, microbatches, given, placement, stages_per_rank)
    found = lower_bound(work, costs)
    if seconds is None:
        return found
    seconds = _seconds(seconds)
    solvers.require()
    if costs.backward is not None or costs.overlap is not None or not solvers.solvable(work):
        return found  # what the solver knows does not hold for all plans, or is too little
    return _certified(found, work, costs, seconds)


def _certified(found: Bound, work: Work, costs: Costs, seconds: float) -> Bound:
    """The bound, or that of the solver where it is higher."""
    for by in get_args(By):
        search = Search(work, costs, by, 0, seconds / 4, 200, None)
        search.run(solve=False)
        hint, by_span = search.orders[0][1], by == "span"
        _, least = solvers.solve(work, hint, by_span, seconds=seconds / 8, seed=0)
        least *= 1 - MARGIN  # the solver counts in floats
        if least > getattr(found, by):
            busy = work.microbatches * sum(work.time) / work.placement.ranks
            name = "bubble" if by_span else "bubble_of_makespan"
            found = replace(found, **{by: least, name: 1 - busy / least})
            found = replace(found, proven="the solver") if by_span else found
    return found


def _seconds(seconds: float) -> float:
    seconds = check("seconds", seconds, float, error=ScheduleError)
    return seconds if seconds > 0 else refuse("seconds", "more than 0", seconds, ScheduleError)


def optimise(
    costs: Costs,
    *,
    ranks: int | None = None,
    microbatches: int,
    memory: Memory | None = None,
    host: Memory | None = None,
    placement: Placement | Shape = "linear",
    stages_per_rank: int = 2,
    seconds: float = 60.0,
    rounds: int | None = None,
    by: By = "span",
    seed: int = 0,
    solver: bool | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan that is found for these costs, in this memory.

    ``memory`` is in ``costs.memory_unit``: one number for all ranks, or one for each.
    Where the costs name ``offload`` or ``recompute``, schedules that need more are fitted into it
    by :func:`fit_memory`, with up to ``host``, and compared with plans that keep all. A
    ``placement`` by name has one stage per rank if it is linear, and ``stages_per_rank`` otherwise.
    ``by`` is what is made short: the longest own span of a rank, or the makespan. The search has a
    number of ``rounds``, which ``seconds`` may only cut short: then, and after Ctrl-C, the result
    is the best plan so far. Otherwise the same arguments lead to the same plan. By default the
    ``solver`` is used where the extra ``taktline[solve]`` is installed.

    >>> from taktline.plan import simulate
    >>> plan = optimise(Costs(), ranks=4, microbatches=8, memory=4, rounds=100)
    >>> simulate(plan).bubble("span") == bound(Costs(), ranks=4, microbatches=8, memory=4).bubble
    True
    """
    check("costs", costs, Costs, error=CostError)
    placement = _placement(ranks, placement, stages_per_rank)
    seconds = _seconds(seconds)
    rounds = None if rounds is None else check("rounds", rounds, int, least=0)
    check_one_of("by", by, get_args(By), error=PlanError)
    check("seed", seed, int)
    if progress is not None:
        check_callable("progress", progress)
    if solver:
        solvers.require()
    scarce, given = False, memory
    if given is not None and costs.saves_memory:
        limits, least = limits_of("memory", given, placement.ranks), _least(costs, placement)
        scarce, memory = bool((limits < least).any()), np.maximum(limits, least).tolist()
    work = _work(costs, ranks, microbatches, memory, placement, stages_per_rank)
    search = Search(work, costs, by, seed, seconds, rounds, progress)
    try:
        search.run(solve=solvers.installed() if solver is None else bool(solver))
    except KeyboardInterrupt:
        if not search.plans and not search.orders:
            raise
    found = search.best()
    if given is None or not costs.saves_memory or (search.large and not scarce):
        return found
    return _fitted(found, costs, given, host, by)


def _fitted(plan: Plan, costs: Costs, memory: Memory, host: Memory | None, by: By) -> Plan:
    """The best in this memory of a plan and of all schedules with its placement."""
    work = _work(costs, None, plan.microbatches, None, plan.placement, 1)

    def cost(plan: Plan) -> float:
        return simulate(plan, costs).cost(by)

    best, short = None, None
    for each in [plan, *fitting(work, costs)]:
        if best is None or cost(each) < cost(best):  # what saves memory makes no plan quicker
            try:
                made = fit_memory(each, costs, memory, host=host, by=by)
            except ScheduleError as error:  # this one needs more
                short = short or error
                continue
            best = made if best is None or cost(made) < cost(best) else best
    if best is None:
        assert short is not None
        raise short
    return best


def _least(costs: Costs, placement: Placement) -> FloatArray:
    """The memory of each rank for one micro-batch, if it keeps all of it."""
    least = np.bincount(placement.rank_of, costs.keeps(placement), placement.ranks)
    return least.astype(float)


def _work(
    costs: Costs,
    ranks: int | None,
    microbatches: int,
    memory: Memory | None,
    placement: Placement | Shape,
    stages_per_rank: int,
) -> Work:
    """The work that arguments describe, or an error that says what is wrong with them."""
    check("costs", costs, Costs, error=CostError)
    placement = _placement(ranks, placement, stages_per_rank)
    microbatches = check("microbatches", microbatches, int, least=1, error=ScheduleError)
    least = _least(costs, placement)
    if memory is None:
        return Work.of(costs, placement, microbatches, [math.inf] * placement.ranks)
    limits = limits_of("memory", memory, placement.ranks)
    short = np.flatnonzero(limits * (1 + MARGIN) < least)
    if len(short):
        rank = int(short[0])
        raise ScheduleError(
            f"no plan fits into memory {limits[rank]:g} on rank {rank}: one micro-batch in its "
            f"{counted(len(placement.stages_of(rank)), 'stage')} needs {least[rank]:g}; "
            f"pass at least this, in {costs.memory_unit}, or cut the model into more ranks"
        )
    return Work.of(costs, placement, microbatches, limits.tolist())


def _placement(ranks: int | None, placement: Placement | Shape, stages_per_rank: int) -> Placement:
    if isinstance(placement, Placement):
        if ranks not in (None, placement.ranks):
            raise ScheduleError(
                f"the placement is for {counted(placement.ranks, 'rank')}, not {ranks}; leave out "
                "ranks"
            )
        return placement
    check_one_of("placement", placement, get_args(Shape), error=ScheduleError)
    if ranks is None:
        raise ScheduleError("pass ranks, or a Placement as placement")
    ranks = check("ranks", ranks, int, least=1, error=ScheduleError)
    each = check("stages_per_rank", stages_per_rank, int, least=1, error=ScheduleError)
    if placement == "linear":
        return Placement.linear(ranks)
    return (Placement.v if placement == "v" else Placement.loop)(ranks, each)
