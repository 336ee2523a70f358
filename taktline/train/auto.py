"""``schedule="auto"``: measures a model on its ranks, and chooses a plan and where to cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from taktline import split
from taktline.checks import conform
from taktline.errors import ScheduleError
from taktline.plan import Placement, Plan, balance, find
from taktline.plan.candidates import Candidate, candidates, described, with_measured
from taktline.plan.io import from_json, to_json
from taktline.plan.rows import as_numbers
from taktline.plan.units import Units, contiguous, with_overhead
from taktline.runtime.introduction import BUILDING, together
from taktline.split import Pieces
from taktline.split.auto import divide
from taktline.stage.names import OPTION, unchanged
from taktline.text import counted, size_in
from taktline.train.rank_limits import held_by
from taktline.train.ranks import Ranks
from taktline.train.stage_table import StageNeeds, measure
from taktline.train.trial import Batches, copies, speeds, timed, traced, units_of

_FINALISTS = 3
"""So many plans of a kind are timed on the ranks."""
_CLOSE, _ALIKE = 1.15, 1.03
"""By how much longer than the best a finalist may be predicted to take; less is no difference."""
_NEAR, _TURNS, _ENOUGH = 1.08, 3, 20e3
"""How near to the quickest a finalist must be to get another turn, the number of turns, and the
milliseconds of steps after which no turn begins."""
_MEASURED = 4
"""Micro-batches for each rank in a measured step, at most."""
_SHARE = 0.9
"""Of the memory of a GPU, for training."""
_SECONDS = 10.0
_ROW = (str, [int], float, float, float, float)


def is_auto(schedule: object) -> bool:
    """Whether the plan is to be chosen."""
    return isinstance(schedule, str) and schedule.lower() == "auto"


def check_auto(given: SimpleNamespace) -> None:
    """Raise unless the arguments of a pipeline fit to its schedule, as far as one can see."""
    if not is_auto(given.schedule):
        return
    if not given.is_whole or given.cuts is not None or given.measure:
        raise ScheduleError(
            'schedule="auto" measures the model, and cuts it itself: pass the whole model, without '
            "cuts and measure; for stages that are cut already, pass the name of a schedule, or "
            "the file of a plan"
        )
    if given.example is None:
        what = "a micro-batch" if given.microbatches is not None else "a batch"
        raise ScheduleError(
            f'schedule="auto" measures steps: pass example=(…), the arguments of {what}, and '
            "example_target=…, its target"
        )


def choose(given: SimpleNamespace, ranks: Ranks) -> str:
    """Measure the model, search, try the best plans; all ranks choose the same, and say why.

    Then ``given`` has the plan, the cuts, and the example of a micro-batch.
    """
    options = ("schedule", "microbatches", "stages_per_rank", "memory")
    said = tuple((OPTION, name, str(getattr(given, name))) for name in options)
    limits = together(ranks, lambda: limits_of(given.memory, ranks.size), lambda _: {"": said})
    limits = limits or _of_gpu(ranks)
    whole = given.microbatches is None
    found: list[Candidate] = []
    batches: dict[int, Batches] = {}
    starts: dict[int, list[str]] = {}
    units = None
    per_rank = (1, 2) if given.stages_per_rank is None else (given.stages_per_rank,)
    numbers = together(ranks, lambda: _numbers(given, ranks) if whole else [given.microbatches])
    for m in numbers:
        batches[m] = together(ranks, lambda m=m: Batches.of(given, m, ranks.device, cut=whole))
        # Cut with a micro-batch, as what is counted without data must be recorded with it before.
        fine = together(ranks, lambda m=m: _finest(given, ranks.size, batches[m]))
        starts[m] = ["", *fine.starts]
        units = _units(given, fine, ranks, batches[m])
        units = _copying(units, ranks) if limits else units
        search = lambda m=m, u=units: candidates(  # noqa: E731
            u, ranks.size, m, per_rank=per_rank, memory=limits, seconds=_SECONDS / len(numbers)
        )
        found += shared(search, ranks)
    assert units is not None
    found.sort(key=lambda each: each.time)
    if units.unit and not ranks.in_one_process:

        def time(each: Candidate) -> list[float]:
            names = [starts[each.plan.microbatches][at] for at in each.bounds[1:-1]]
            stages = together(ranks, lambda: _stages(given, names))
            made = copies(given, stages, each.plan.placement, ranks)
            return timed(made, each.plan, ranks, batches[each.plan.microbatches])

        found = tried(found, time, ranks, "1f1b")
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    best, m = found[0], found[0].plan.microbatches
    if whole:
        first = batches[m]
        given.example, given.example_target = (first.args[0], first.kwargs[0]), first.targets[0]
    given.schedule, given.cuts = best.plan, [starts[m][at] for at in best.bounds[1:-1]]
    given.microbatches = given.stages_per_rank = None
    return described(found, units, limits)


def rechosen(built: Any) -> tuple[Plan, str]:
    """The best plan for the stages as they are, by steps of them that change nothing; and why.

    ``built`` is a pipeline that trains. All ranks choose the same.
    """
    ranks, plan, modules = built.ranks, built.plan, built.model.modules
    known = {"example": built.example, "example_target": built.example_target}
    given, m = SimpleNamespace(**built.options, **known), plan.microbatches
    limits = together(ranks, lambda: limits_of(built.memory, ranks.size)) or _of_gpu(ranks)
    with unchanged(modules.values()):
        batches = together(ranks, lambda: Batches.of(given, m, ranks.device, cut=False))
        units = units_of(modules, plan, ranks, batches)
        needs = built.table.needs
        weights = ranks.processes.everywhere(
            lambda: [[stage, held_by(module)] for stage, module in modules.items()],
            "count weights",
            _REPLAN,
        )
        held = dict(pair for process in weights for pair in process)
        units = _with_sizes(units, [held[stage] for stage in range(plan.stages)], needs)
        units = _copying(units, ranks) if limits else units

        def search() -> list[Candidate]:
            options: Any = {"memory": limits, "seconds": _SECONDS, "also": plan}
            return candidates(units, ranks.size, m, placement=plan.placement, **options)

        found = shared(search, ranks)
        if not ranks.in_one_process:
            found = tried(
                found, lambda each: timed(modules, each.plan, ranks, batches), ranks, plan.name
            )
    return found[0].plan, described(found, units, limits)


_REPLAN = "replan()"


def limits_of(memory: Any, ranks: int) -> list[float] | None:
    """The bytes that each rank may use, if they were passed."""
    if memory is None:
        return None

    def bytes_in(each: Any) -> Any:
        return size_in(each) if isinstance(each, str) else each

    is_list = isinstance(memory, list | tuple)
    numbers = as_numbers([bytes_in(each) for each in memory] if is_list else bytes_in(memory))
    if numbers is None or numbers.ndim > 1 or not (numbers > 0).all():
        raise ScheduleError(
            'memory must be a number of bytes above 0, a text such as "16GiB", or one of these for '
            f"each rank, not {memory!r}"
        )
    if numbers.ndim and len(numbers) != ranks:
        raise ScheduleError(
            f"memory is for {counted(len(numbers), 'rank')}, but there are {ranks}; pass one "
            "number for all, or one for each"
        )
    return np.broadcast_to(numbers, ranks).astype(float).tolist()


def _of_gpu(ranks: Ranks) -> list[float] | None:
    """Most of the GPU of this process, of which several may share one."""
    if ranks.device.type != "cuda":
        return None
    known = torch.cuda.get_device_properties(ranks.device)
    names = ranks.processes.everywhere(lambda: str(known.uuid), "find its GPU", BUILDING)
    return [_SHARE * known.total_memory / names.count(str(known.uuid))] * ranks.size


def shared(search: Callable[[], list[Candidate]], ranks: Ranks) -> list[Candidate]:
    """What the first process of all replicas has found, or its error."""

    def rows() -> list[Any]:
        if ranks.processes.place:
            return []
        return [
            (to_json(each.plan), each.bounds, each.time, each.bubble, each.memory, each.least)
            for each in search()
        ]

    found = ranks.processes.everywhere(rows, "choose a plan", BUILDING)
    return [
        Candidate(from_json(text), tuple(bounds), *numbers)
        for text, bounds, *numbers in conform(found[0], [_ROW], what="the plans to choose from")
    ]


def tried(
    found: Sequence[Candidate], time: Callable[[Candidate], list[float]], ranks: Ranks, also: str
) -> list[Candidate]:
    """The candidates in a new order: those first that were quick on these ranks.

    The best few are timed, the best of each placement, the simplest of those that are predicted to
    be as good, and the plan of a name. Those that are near the quickest take turns, so that a slow
    while is no single one's.
    """
    firsts = {each.plan.placement: each for each in reversed(found)}.values()
    alike = [each for each in found if each.time <= _ALIKE * found[0].time]
    simplest = sorted(alike, key=lambda each: len(each.plan))[:_FINALISTS]
    best = [each for each in found if each in (*found[:_FINALISTS], *firsts, *simplest)]
    finalists = [each for each in best if each.time <= _CLOSE * found[0].time]
    finalists += [each for each in found if each.plan.name == also and each not in finalists][:1]
    took: list[list[float]] = [[] for _ in finalists]
    near = [*range(len(finalists))]
    for _ in range(_TURNS):
        mine = [time(finalists[at]) for at in near]
        everyone = ranks.processes.everywhere(lambda m=mine: m, "time a plan", BUILDING)
        for at, steps in zip(near, np.max(np.array(everyone), axis=0).tolist(), strict=True):
            took[at] += steps
        least = _NEAR * min(map(min, took))
        near = [at for at in reversed(near) if min(took[at]) <= least]
        if len(near) == 1 or sum(map(sum, took)) > _ENOUGH:
            break
    rest = [each for each in found if each not in finalists]
    return with_measured([*finalists, *rest], [*map(median, took)])


def _numbers(given: SimpleNamespace, ranks: Ranks) -> list[int]:
    """The numbers of micro-batches to choose from: those into which the batch divides evenly."""
    batch = Batches.of(given, 1, torch.device("cpu"), cut=True)
    sizes = [x.shape[0] for x in (*batch.args[0], *batch.kwargs[0].values()) if _has_rows(x)]
    rows = sizes[0] if sizes else 0
    found = [n for n in (ranks.size * times for times in (1, 2, 4, 8)) if rows and rows % n == 0]
    if not found:
        raise ScheduleError(
            f"a batch of {counted(rows, 'row')} does not divide evenly into {ranks.size}, "
            f"{2 * ranks.size}, {4 * ranks.size} or {8 * ranks.size} micro-batches; pass "
            "microbatches=…, and as example one of them"
        )
    return found


def _has_rows(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _finest(given: SimpleNamespace, ranks: int, batches: Batches) -> Pieces:
    """The model in as many pieces as it can be cut into."""
    example = batches.args[0], batches.kwargs[0]
    found = divide(given.model, None, example, None)
    if len(found) < ranks:
        divide(given.model, ranks, example, None)  # which says why it cannot be cut
    return found


def _stages(given: SimpleNamespace, cuts: list[str]) -> Sequence[nn.Module]:
    if not cuts:
        return [given.model]
    return split.by_names(given.model, cuts, example=given.example)


def _units(given: SimpleNamespace, fine: Pieces, ranks: Ranks, batches: Batches) -> Units:
    """The costs of the pieces: measured on the ranks, or counted for a model on the meta device."""
    needs = together(ranks, lambda: measure(fine, (batches.args[0], batches.kwargs[0])))
    weights = [held_by(module) for module in fine]
    work = np.ones((3, len(fine))) if needs is None else np.array([n.work for n in needs], float).T
    if any(parameter.is_meta for parameter in given.model.parameters()):
        counted_work = np.vstack([work[0], work[1:].sum(0), work[1:]])
        return _with_sizes(Units(counted_work), weights, needs)
    bounds = balance(work.sum(0).tolist(), ranks.size).bounds
    m = min(len(batches.args), _MEASURED * ranks.size)
    plan = contiguous(ranks.size, bounds, m)
    units = units_of(copies(given, fine, plan.placement, ranks), plan, ranks, batches)
    if not ranks.in_one_process:
        names = [fine.starts[at - 1] for at in bounds[1:-1]]
        stages = together(ranks, lambda: _stages(given, names))
        made = copies(given, stages, Placement.linear(ranks.size), ranks)
        steps = traced(made, find("1f1b").build(ranks.size, m), ranks, batches)
        units = with_overhead(units, steps, bounds)
    return _with_sizes(units, weights, needs)


def _copying(units: Units, ranks: Ranks) -> Units:
    """The same with the speed of copies to the host, if it is known what stages keep."""
    if not units.sizes[0].any():
        return units
    all_ranks = ranks.processes.everywhere(
        lambda: list(speeds(ranks.device)), "measure copies", BUILDING
    )
    operations, bandwidth = np.min(np.array(all_ranks), axis=0).tolist()
    return replace(units, bandwidth=bandwidth / (1e3 if units.unit else operations))


def _with_sizes(units: Units, weights: Sequence[int], needs: Sequence[StageNeeds] | None) -> Units:
    """The same with the bytes that the units hold, keep and send, as far as they are known."""
    each = [(0, 0)] * len(weights) if needs is None else [(x.keeps, x.sends) for x in needs]
    keeps, sends = zip(*each, strict=True)
    return replace(units, sizes=np.array([keeps, weights, sends], float))
