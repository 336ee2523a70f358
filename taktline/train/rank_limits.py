"""Ranks of unequal memory and speed: what stages take, and where to cut so that each rank fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, repeat
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from taktline.errors import MismatchError, PartitionError
from taktline.plan import Plan
from taktline.plan.candidates import cut
from taktline.plan.estimate import (
    AT_ONCE,
    PARTS,
    Bytes,
    RankLimit,
    boundary_messages,
    estimate,
    in_flight,
)
from taktline.plan.units import Units
from taktline.split.auto import Division, Measure, divide
from taktline.split.steps import all_tensors
from taktline.text import counted, size_text
from taktline.train import stage_table
from taktline.train.moments import Live, Moment
from taktline.train.weights import bytes_of

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of some parameters, such as ``torch.optim.SGD``."""


def check_limits(given: Any, *, is_auto: bool) -> None:
    """Raise unless the other arguments of a pipeline fit to a list of what its ranks have."""
    if given.memory is not None:
        raise MismatchError("ranks=[…] says what memory each rank has; leave out memory=")
    if is_auto:
        if any(limit.speed != 1 for limit in given.limits):
            raise MismatchError('schedule="auto" measures its ranks; leave out "speed"')
        known = [limit.memory for limit in given.limits]
        given.memory = None if math.inf in known else known
    elif given.is_whole and given.example is None and given.cuts is None:
        raise PartitionError(
            "ranks=[…] cuts the model by what its layers take: pass example=(…), the arguments of "
            "one micro-batch, or cuts=[…]"
        )


def stage_bytes(
    modules: Iterable[nn.Module],
    needs: Sequence[stage_table.StageNeeds],
    optimizer: MakeOptimizer = torch.optim.AdamW,
    moments: Sequence[Moment | None] | None = None,
    *,
    streams: bool = False,
) -> list[Bytes]:
    """What stages take in training, with the state of an optimizer; frozen weights have none.

    ``moments`` are what they were measured to keep, in place of the needs. With ``streams``, frozen
    weights come from the host.
    """
    found: list[Bytes] = []
    for module, need, moment in zip(modules, needs, moments or repeat(None), strict=False):
        held = {id(each): each for each in (*module.parameters(), *module.buffers())}
        trained = [each for each in held.values() if each.requires_grad]
        weights, gradients = sum(map(bytes_of, held.values())), sum(t.nbytes for t in trained)
        frozen = (each for each in held.values() if isinstance(each, nn.Parameter))
        streamed = sum(bytes_of(p) for p in frozen if not p.requires_grad) if streams else 0
        keeps, working = moment or Moment(need.keeps, 0)
        known = {"activations": keeps, "messages": need.sends, "streamed": streamed}
        state, updating = _state_bytes(trained, optimizer)
        known |= {"optimizer": state, "updating": updating, "working": working}
        found.append(Bytes(weights=weights - streamed, gradients=gradients, **known))
    return found


def held_by(module: nn.Module) -> int:
    """What a stage takes all the time, trained with AdamW."""
    return int(stage_bytes([module], [stage_table.NOTHING])[0].held)


def held_by_ranks(plan: Plan, modules: Mapping[int, nn.Module], *, streams: bool) -> list[float]:
    """What each rank takes all the time, trained with AdamW."""
    listed = [modules[stage] for stage in range(plan.stages)]
    found = stage_bytes(listed, [stage_table.NOTHING] * plan.stages, streams=streams)
    return [rank.held for rank in estimate(plan, found)]


def _state_bytes(trained: Sequence[torch.Tensor], make: MakeOptimizer) -> tuple[int, int]:
    """The bytes of an optimizer's state, and what its step needs for a moment: without data."""
    empty = [nn.Parameter(torch.empty_like(each, device="meta")) for each in trained]
    for each in empty:
        each.grad = torch.empty_like(each)
    if not empty:
        return 0, 0
    optimizer = make(empty)
    on_gpu = any(each.device.type in ("cuda", "meta") for each in trained)
    for group in optimizer.param_groups if on_gpu else ():  # as torch does by default there
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    optimizer.step()
    with Live([*empty, *all_tensors(list(optimizer.state.values()))]) as live:
        optimizer.step()
    state = sum(part.nbytes for each in optimizer.state.values() for part in all_tensors(each))
    return state, live.most if on_gpu else 0  # else one parameter after another


def cuts_within(
    model: nn.Module,
    plan: Plan,
    example: Any,
    limits: Sequence[RankLimit],
    measure: Measure | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    *,
    streams: bool = False,
) -> list[str]:
    """The names of the submodules with which stages begin, so that each rank fits its memory.

    The stages of a rank take as long as those of others, by their speeds, as far as that fits.
    """
    fine = divide(model, None, example, measure)
    if len(fine) < plan.stages:
        divide(model, plan.stages, example, None)  # which says why it cannot be cut
    needs = stage_table.measure(fine, example)
    if needs is None:
        raise PartitionError(
            f"what the layers of {type(model).__name__} keep for their backward is not known, as "
            "its forward cannot run without data; pass cuts=[…], the names at which stages begin"
        )
    assert isinstance(fine.division, Division)
    took = np.array(fine.division.partition.stage_costs, float)
    stages = stage_bytes(fine, needs, optimizer, streams=streams)
    sizes = [[float(s.activations), s.held, s.messages] for s in stages]
    units = Units(np.stack([took, 2 * took, took, took]), np.array(sizes).T)
    # Those of a usual boundary: which ones there are, the cut decides.
    usual = [median(stage.messages for stage in stages)] * plan.stages
    messages = boundary_messages(plan, usual)
    usual_stage = sum(stage.streamed for stage in stages) / plan.stages
    taken = [AT_ONCE * usual_stage + some for some in messages.tolist()]
    rooms = [limit.memory - some for limit, some in zip(limits, taken, strict=True)]
    speeds, names = [limit.speed for limit in limits], ["the first layers", *fine.starts]
    bounds = cut(units, plan.placement, rooms, speeds, in_flight(plan))
    sums = [
        {part: sum(getattr(s, part) for s in stages[a:b]) for part in (*PARTS, "streamed")}
        for a, b in pairwise(bounds)
    ]
    sent = [stages[end - 1].messages for end in bounds[1:]]
    joined = [
        Bytes(**each | {"messages": some, "updating": 0})
        for each, some in zip(sums, sent, strict=True)
    ]
    found = [each.total for each in estimate(plan, joined)]
    lacks = [total - limit.memory for total, limit in zip(found, limits, strict=True)]
    if max(lacks) > 0:
        worst = lacks.index(max(lacks))
        _require_room(stages, rooms, limits, names)
        raise PartitionError(
            f"no cut into {counted(plan.stages, 'stage')} keeps within the memory of the ranks: "
            f"in the best one, rank {worst} needs {size_text(found[worst])} of its "
            f"{size_text(limits[worst].memory)}; make micro-batches smaller, train fewer weights, "
            "or start more ranks"
        )
    return [names[at] for at in bounds[1:-1]]


def _require_room(
    stages: Sequence[Bytes],
    rooms: Sequence[float],
    limits: Sequence[RankLimit],
    names: Sequence[str],
) -> None:
    """Raise if a block alone is too large for every rank."""
    needs = [stage.held + stage.streamed + stage.activations for stage in stages]
    worst, rank = needs.index(max(needs)), rooms.index(max(rooms))
    if needs[worst] > rooms[rank]:
        parts = ", ".join(f"{name} {size_text(getattr(stages[worst], name))}" for name in PARTS[:4])
        raise PartitionError(
            f"no rank is large enough for {names[worst]!r}: it needs {size_text(needs[worst])} "
            f"({parts} of one micro-batch), and rank {rank}, the largest, has "
            f"{size_text(limits[rank].memory)}, {size_text(max(0.0, rooms[rank]))} of it beside "
            "messages; train adapters, quantise frozen weights or let them stream, or make "
            "micro-batches smaller"
        )
