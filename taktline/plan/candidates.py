"""Plans to choose from: schedules, placements and cuts for the costs of a model's units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from taktline.errors import ScheduleError
from taktline.plan.fit import least_memory
from taktline.plan.memory import peak_memory
from taktline.plan.optimise import bound, optimise
from taktline.plan.partition import balance, cheapest
from taktline.plan.plan import Placement, Plan
from taktline.plan.portfolio import fitting
from taktline.plan.rows import FloatArray
from taktline.plan.sharing import predict
from taktline.plan.units import Units
from taktline.plan.work import Work
from taktline.text import counted, size_text, table


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan for stages that begin at some units, and what it is predicted to need."""

    plan: Plan
    bounds: tuple[int, ...]
    time: float
    """Of a step."""
    bubble: float
    memory: float
    """Bytes of the rank that needs the most; 0 if they are not known."""
    least: float
    """The time that no plan with these stages beats in this memory."""
    measured: float | None = None
    """The time of a step of it."""

    @property
    def cost(self) -> float:
        """The measured time, or else the predicted one."""
        return self.time if self.measured is None else self.measured


def candidates(
    units: Units,
    ranks: int,
    microbatches: int,
    *,
    per_rank: Sequence[int] = (1, 2),
    placement: Placement | None = None,
    also: Plan | None = None,
    memory: Sequence[float] | None = None,
    seconds: float = 20.0,
) -> list[Candidate]:
    """The plans that fit into the memory, the quickest first.

    Stages are cut anew for each placement, unless there is one for units that are stages already.
    Then ``also`` is a plan for them that is compared, too.

    >>> units = Units(np.array([[1.0] * 8, [2.0] * 8, [1.0] * 8, [1.0] * 8]))
    >>> best = candidates(units, 4, 8, seconds=2)[0]
    >>> best.time < 8 * 3 * 2 + 3 * 3 * 2  # that of 1F1B
    True
    """
    placements = list(_placements(ranks, per_rank)) if placement is None else [placement]
    placements = [each for each in placements if each.stages <= len(units)]
    if not placements:
        raise ScheduleError(
            f"the model can be cut into {counted(len(units), 'stage')}, too few for "
            f"stages_per_rank={min(per_rank)} on {counted(ranks, 'rank')}; pass less"
        )
    limits = [math.inf] * ranks if memory is None else list(memory)
    needs: list[tuple[float, int, Placement]] = []
    found: list[Candidate] = []
    for each in placements:
        bounds = tuple(range(len(units) + 1)) if placement else cut(units, each, limits)
        first, held = (_by_rank(each, part) for part in units.held(bounds))
        if units.bandwidth and (held + first > limits).any():
            if placement is None:  # as small as they can be, whatever there is, and takes
                alike = replace(units, times=np.ones_like(units.times))
                bounds = cut(alike, each, [limit - max(limits) for limit in limits])
                held = _by_rank(each, units.held(bounds)[1])
            first = _least(units, bounds, each, microbatches, limits - held)
        lack = held + first - limits
        if (lack > 0).any():
            worst = int(lack.argmax())
            needs.append((float((held + first)[worst]), worst, each))
            continue
        room = [limit - part for limit, part in zip(limits, held.tolist(), strict=True)]
        share = seconds / len(placements)
        found += _planned(units, bounds, each, microbatches, held, room, share, also)
    if not found:
        need, rank, each = min(needs, key=lambda need: need[0])
        raise ScheduleError(
            f"no plan fits into memory={size_text(limits[rank])}: the least is "
            f"{size_text(need)} on rank {rank}, with {each.shape}, for "
            f"its weights, their gradients, an optimizer like Adam and one micro-batch; pass at "
            "least this as memory, make micro-batches smaller, or start more ranks"
        )
    return sorted(found, key=lambda each: each.time)


def _placements(ranks: int, per_rank: Sequence[int]) -> Iterator[Placement]:
    for each in per_rank:
        yield Placement.loop(ranks, each)
        if each > 1 and ranks > 1:
            yield Placement.v(ranks, each)


def _least(
    units: Units, bounds: tuple[int, ...], placement: Placement, microbatches: int, room: FloatArray
) -> FloatArray:
    """What each rank keeps at least, where as much as possible is copied or computed again."""
    costs = units.costs(bounds, placement)
    work = Work.of(costs, placement, microbatches, [math.inf] * placement.ranks)
    known = [least_memory(plan, costs) for plan in fitting(work, costs, slow=False)]
    return min(known, key=lambda least: float((least - room).max()))


def _planned(
    units: Units,
    bounds: tuple[int, ...],
    placement: Placement,
    microbatches: int,
    held: FloatArray,
    room: Sequence[float],
    seconds: float,
    also: Plan | None,
) -> Iterator[Candidate]:
    """The named schedules with this placement, and the best plan that is found."""
    costs = units.costs(bounds, placement)
    given = None if math.inf in room else room
    found = optimise(
        costs,
        placement=placement,
        microbatches=microbatches,
        memory=given,
        by="makespan",
        seconds=seconds,
        rounds=_ROUNDS,
        solver=False,
    )
    shared = Work.of(costs, placement, microbatches, list(room))
    least = bound(costs, placement=placement, microbatches=microbatches, memory=given).makespan
    n = placement.stages
    halves = costs.of("backward_input", n) + costs.of("backward_weight", n)
    busy = costs.of("forward", n) + np.minimum(costs.of("backward", n), halves)
    busy *= microbatches
    if units.spinning:  # the time of a step is the mean of when its ranks would end
        others = busy.sum() - _by_rank(placement, busy).max()
        least = (least + float(others)) / placement.ranks
    else:
        least = max(least, float(busy.sum()) / min(units.cores, placement.ranks))
    plans = [*fitting(shared, costs), found, *([] if also is None else [also])]
    for place, plan in enumerate(plans):
        if plan in plans[:place]:
            continue
        timeline = predict(plan, costs, units.cores, spinning=units.spinning)
        used = float((held + peak_memory(plan, costs)).max())
        yield Candidate(plan, bounds, timeline.makespan, timeline.bubble(), used, least)


_ROUNDS = 500


def cut(
    units: Units,
    placement: Placement,
    limits: Sequence[float],
    speeds: Sequence[float] | None = None,
    flights: Sequence[FloatArray] | None = None,
) -> tuple[int, ...]:
    """Where the stages begin and end, so that the busiest rank has as little to do as possible.

    ``flights`` are the micro-batches in flight, as :func:`in_flight` finds them in a plan; by
    default one. Where nothing fits into the limits, it lacks as little as possible.

    >>> units = Units(np.array([[1.0] * 7 + [4.0]] * 4))
    >>> cut(units, Placement.v(2), [math.inf] * 2)
    (0, 2, 4, 7, 8)
    """
    time = units.times[:2].sum(0)
    keeps, held = units.held(range(len(units) + 1))
    rank_of, ends, n = np.array(placement.rank_of), [0.0], placement.stages
    sums = [np.concatenate([ends, np.cumsum(each)]) for each in (time, held, keeps)]
    rates = np.ones(placement.ranks) if speeds is None else np.array(speeds, float)
    mean = max(float(time.sum()) / rates.sum(), 1e-9)
    own = [placement.stages_of(rank) for rank in range(placement.ranks)]
    flights = [np.ones((1, len(stages))) for stages in own] if flights is None else flights

    def score(bounds: Sequence[int]) -> tuple[float, float, float]:
        parts = [np.diff(each[np.array(bounds)]) for each in sums]
        busy = np.bincount(rank_of, parts[0], placement.ranks) / rates
        peaks = [(live @ parts[2][[*s]]).max() for s, live in zip(own, flights, strict=True)]
        used = np.bincount(rank_of, parts[1], placement.ranks) + np.array(peaks)
        lack = np.maximum(used - limits, 0.0)
        return float(lack.max()), float(lack.sum()), float(((busy / mean) ** 8).sum())

    # With one stage on each rank this is the best cut already, if any keeps within the limits.
    most = np.zeros(n)
    for stages, live in zip(own, flights, strict=True):
        most[[*stages]] = live.max(axis=0)

    def takes(stage: int, start: int, end: int) -> float:
        took, needs, kept = (float(each[end] - each[start]) for each in sums)
        rank = placement.rank_of[stage]
        fits = needs + float(most[stage]) * kept <= limits[rank]
        return took / float(rates[rank]) if fits else math.inf

    starts = [cheapest(len(units), n, takes, max), balance(time.tolist(), n).bounds]
    best = [*min(filter(None, starts), key=score)]
    least, better = score(best), True
    inner = range(1, placement.stages)
    # Each cut by itself, and all between two of them: stages in between move as they are.
    spans = [range(a, b) for a, b in combinations(range(1, placement.stages + 1), 2)]
    spans = spans if placement.stages <= _FEW else [range(at, at + 1) for at in inner]
    while better:
        better = False
        for span in spans:
            for by in (1, -1):
                moved: list[int] = [end + by * (at in span) for at, end in enumerate(best)]
                if (np.diff(moved) > 0).all() and score(moved) < least:
                    best, least, better = moved, score(moved), True
    return tuple(best)


_FEW = 32


def _by_rank(placement: Placement, each: FloatArray) -> FloatArray:
    return np.bincount(placement.rank_of, each, placement.ranks).astype(float)


def described(found: Sequence[Candidate], units: Units, limits: Sequence[float] | None) -> str:
    """The best plans as a table, and why the first one was chosen."""
    lines = [["plan", "stages", "micro-batches", "predicted", "measured", "bubble", "memory"]]
    for each in found[:_SHOWN]:
        took = "" if each.measured is None else f"{each.measured:.4g}"
        memory = size_text(each.memory) if each.memory else ""
        shape = str(each.plan.placement).partition(",")[0]
        shape = f"{each.plan.placement.stages // each.plan.ranks} a rank, {shape}"
        numbers = [str(each.plan.microbatches), f"{each.time:.4g}", took, f"{each.bubble:.1%}"]
        lines.append([each.plan.name, shape, *numbers, memory])
    best = found[0]
    basis = "counted operations" if not units.unit else "costs measured on these ranks"
    how = "measured to be among" if best.measured is not None else "predicted to be"
    room = "" if limits is None else f" within {size_text(min(limits))} a rank"
    cores = "" if units.cores == math.inf else f", {units.cores:.2g} of which compute at a time"
    cores = ", which take turns on a GPU" if units.spinning else cores
    least = min(each.least for each in found)
    return (
        f"chosen: {best.plan.name}, {how} the quickest of {counted(len(found), 'plan')}{room} "
        f"(times in {units.unit or 'operations'}, from {basis}{cores}); no plan with these cuts "
        f"takes less than {least:.4g}\n{table(lines, left=['plan', 'stages'])}"
    )


_SHOWN = 8


def with_measured(found: Sequence[Candidate], times: Sequence[float]) -> list[Candidate]:
    """The candidates in a new order, the first of which were measured.

    Of those that are as quick as one can tell, the schedules with names come first.
    """
    known = [replace(each, measured=time) for each, time in zip(found, times, strict=False)]
    alike = _ALIKE * min(times)

    def order(each: Candidate) -> tuple[bool, bool, float]:
        return each.cost > alike, each.cost <= alike and each.plan.name == "optimised", each.cost

    return sorted(known, key=order) + list(found[len(known) :])


_ALIKE = 1.03
"""By how much steps of one plan may differ from one measurement to the next."""
