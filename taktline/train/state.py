"""The state of a pipeline, under the names of the model that it was made of."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist

from taktline.checkpoint.holding import Holding, Together, foremost
from taktline.checkpoint.snapshot import settle
from taktline.errors import MismatchError, TransportError
from taktline.meta import DTYPES, name_of
from taktline.sharding import is_sharded
from taktline.stage.ties import declared
from taktline.text import counted
from taktline.train.build import Built
from taktline.train.model_stages import Parts
from taktline.train.ranks import Ranks
from taktline.transport.exchange import share_values

__all__ = ["gathered", "holding", "load", "own"]

_log = logging.getLogger("taktline")
_LARGE = 8 << 30
"""More bytes than one process should hold."""


def holding(built: Built) -> Holding:
    """What this process has of the model, to be saved or loaded."""
    parts, ranks = built.parts, built.ranks
    first = parts.first_names()
    return Holding(
        [each._replace(name=first.get(each.name, each.name)) for each in parts.held()],
        list(parts.modules.values()),
        {name: known for name, known in first.items() if name != known},
        parts.names,
        parts.rest,
        Together(ranks.everyone),
        built.schedule,
        ranks.device,
    )


def own(parts: Parts, *, with_rest: bool) -> dict[str, torch.Tensor]:
    """What this process holds, in the model's order; the tensors themselves."""
    held = {name: each.tensor.detach() for name, each in foremost(parts.held()).items()}
    held |= {name: held[known] for name, known in parts.aliases.items() if known in held}
    if with_rest:
        held |= parts.rest
    return {name: held[name] for name in (*parts.names, *held) if name in held}


def gathered(parts: Parts, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The whole state on the CPU of the first rank, nothing on the others; all take part."""
    first = 0 in ranks.own
    mine = {
        name: value.full_tensor() if is_sharded(value) else value
        for name, value in own(parts, with_rest=first).items()
    }
    if not ranks.is_first:
        return {}
    if ranks.group is None:
        _say_size(sum(value.nbytes for value in mine.values()))
        return {name: _snapshot(value) for name, value in mine.items()}
    priorities = {name: each.priority for name, each in foremost(parts.held()).items()}
    kinds = [
        (name, list(value.shape), name_of(value.dtype), priorities.get(name, -1))
        for name, value in mine.items()
    ]
    call, shape = "state_dict(gathered=True)", [(str, [int], str, int)]
    told = share_values(ranks.transport, kinds, shape, call, what="the state")
    if not first:
        for value in mine.values():
            dist.send(value.to(ranks.device).contiguous(), group=ranks.group, group_dst=0)
        return {}
    state = {name: _snapshot(value) for name, value in mine.items()}
    coming = [_kinds(told[rank], rank) for rank in range(1, ranks.size)]
    sent = (prod(shape) * kind.itemsize for kinds in coming for _, shape, kind, _ in kinds)
    _say_size(sum(value.nbytes for value in mine.values()) + sum(sent))
    for rank, kinds in enumerate(coming, 1):
        for name, shape, kind, priority in kinds:
            value = torch.empty(shape, dtype=kind, device=ranks.device)
            dist.recv(value, group=ranks.group, group_src=rank)
            if name not in state or priorities.get(name, priority) < priority:
                state[name], priorities[name] = value.cpu(), priority
    return {name: state[name] for name in (*parts.names, *state) if name in state}


def _kinds(
    kinds: list[tuple[str, list[int], str, int]], rank: int
) -> list[tuple[str, list[int], torch.dtype, int]]:
    """The name, shape, type and priority of each tensor that a rank sends."""
    for name, shape, dtype, _ in kinds:
        if dtype not in DTYPES or min(shape, default=0) < 0:
            raise TransportError(f"rank {rank} has no tensor {name} of {dtype}{shape}")
    return [(name, shape, DTYPES[dtype], priority) for name, shape, dtype, priority in kinds]


def _say_size(size: int) -> None:
    level = logging.WARNING if size > _LARGE else logging.INFO
    _log.log(
        level,
        "state_dict(gathered=True) takes %.1f MiB on the first rank; pipe.save(…) writes a model "
        "of any size",
        size / 2**20,
    )


def _snapshot(value: torch.Tensor) -> torch.Tensor:
    return value.to("cpu", copy=True)


def load(parts: Parts, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    """Take what belongs to the stages of this process; the rest is for others."""
    known = _with_synonyms(parts, state)
    if strict:
        held = own(parts, with_rest=True)
        missing = [name for name in held if name not in known]
        if missing:
            raise MismatchError(f"{_told(missing)} not in the state; {_ADVICE}")
        foreign = [name for name in state if name not in parts.names and name not in held]
        if foreign:
            raise MismatchError(f"{_told(foreign)} in the state, but not in the model; {_ADVICE}")
    settle()
    with torch.no_grad():
        for name, tensor in (*(each[:2] for each in parts.held()), *parts.rest.items()):
            if name in known:
                _copy(tensor, known[name], name)


_ADVICE = "pass strict=False to load what fits"


def _with_synonyms(parts: Parts, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The state with a weight that has several names under each of them, as some files have one."""
    synonyms = [[name, known] for name, known in parts.aliases.items()]
    for module in parts.modules.values():
        synonyms += [[parts.name(*use) for use in tie.uses] for tie in declared(module)]
    found = dict(state)
    for names in synonyms:
        there = [name for name in names if name in found]
        if there:
            found |= {name: found[there[0]] for name in names if name not in found}
    return found


def _told(names: Sequence[str]) -> str:
    more = f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
    return f"{names[0]}{more} {'are' if more else 'is'}"


def _copy(tensor: torch.Tensor, value: torch.Tensor, name: str) -> None:
    if tensor.shape != value.shape:
        raise MismatchError(
            f"{name} is {list(tensor.shape)} in the model, but {list(value.shape)} in the state"
        )
    if is_sharded(tensor) and not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        # Every rank has the value, so each takes its part of it: nothing is sent.
        value = distribute_tensor(
            value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
    tensor.copy_(value)
