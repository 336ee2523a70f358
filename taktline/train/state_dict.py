"""``state_dict()`` and ``load_state_dict()`` of a pipeline, with the model's own names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist

from taktline.checkpoint.model_state import ModelState, foremost, writers
from taktline.checks import require_flag, require_instance
from taktline.errors import MismatchError, TransportError
from taktline.meta import DTYPES, name_of
from taktline.sharding import is_sharded
from taktline.stage.names import declared
from taktline.text import first_of
from taktline.train.ranks import Ranks
from taktline.transport.exchange import share_values

_log = logging.getLogger("taktline")
_LARGE = 8 << 30
"""More bytes than one process should hold."""


def own_state(model: ModelState, *, with_rest: bool) -> dict[str, torch.Tensor]:
    """The tensors of this process, in the model's order; not copies."""
    held = {name: each.tensor.detach() for name, each in foremost(model.held()).items()}
    held |= {name: held[known] for name, known in model.aliases.items() if known in held}
    if with_rest:
        held |= model.rest
    return {name: held[name] for name in (*model.names, *held) if name in held}


def gathered_state(model: ModelState, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The whole state on the CPU of the first rank, nothing on the others; all take part."""
    first = 0 in ranks.own
    mine = {
        name: value.full_tensor() if is_sharded(value) else value
        for name, value in own_state(model, with_rest=first).items()
    }
    if not ranks.is_first:
        return {}
    if ranks.group is None:
        _log_size(sum(value.nbytes for value in mine.values()))
        return {name: value.to("cpu", copy=True) for name, value in mine.items()}
    priorities = {name: each.priority for name, each in foremost(model.held()).items()}
    kinds = [
        (name, list(value.shape), name_of(value.dtype), priorities.get(name, -1))
        for name, value in mine.items()
    ]
    call, shape = "state_dict(gathered=True)", [(str, [int], str, int)]
    shared = share_values(ranks.transport, kinds, shape, call, what="the state")
    listed = [_kinds(kinds, rank) for rank, kinds in enumerate(shared)]
    sender = writers([[(name, priority) for name, _, _, priority in kinds] for kinds in listed])
    coming = [(rank, *kind) for rank, kinds in enumerate(listed) for kind in kinds]
    coming = [each for each in coming if sender[each[1]] == each[0]]
    if first:
        _log_size(sum(prod(shape) * kind.itemsize for _, _, shape, kind, _ in coming))
    state: dict[str, torch.Tensor] = {}
    for rank, name, shape, kind, _ in coming:
        if rank == ranks.transport.rank and not first:
            dist.send(mine[name].to(ranks.device).contiguous(), group=ranks.group, group_dst=0)
        elif first and rank:
            value = torch.empty(shape, dtype=kind, device=ranks.device)
            dist.recv(value, group=ranks.group, group_src=rank)
            state[name] = value.cpu()
        elif first:
            state[name] = mine[name].to("cpu", copy=True)
    return {name: state[name] for name in (*model.names, *state) if name in state}


def _kinds(
    kinds: list[tuple[str, list[int], str, int]], rank: int
) -> list[tuple[str, list[int], torch.dtype, int]]:
    """The name, shape, type and priority of each tensor that a rank sends."""
    for name, shape, dtype, _ in kinds:
        if dtype not in DTYPES or min(shape, default=0) < 0:
            raise TransportError(f"rank {rank} has no tensor {name} of {dtype}{shape}")
    return [(name, shape, DTYPES[dtype], priority) for name, shape, dtype, priority in kinds]


def _log_size(size: int) -> None:
    level = logging.WARNING if size > _LARGE else logging.INFO
    _log.log(
        level,
        "state_dict(gathered=True) takes %.1f MiB on the first rank; pipe.save(…) writes a model "
        "of any size",
        size / 2**20,
    )


def load_state(model: ModelState, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    """Load the tensors of this process from a state of the whole model."""
    require_instance("state_dict", state, Mapping, "a mapping from names to tensors")
    require_flag("strict", strict)
    known = _with_synonyms(model, state)
    if strict:
        held = own_state(model, with_rest=True)
        missing = [name for name in held if name not in known]
        if missing:
            raise MismatchError(f"the state lacks {first_of(missing)}; {_ADVICE}")
        foreign = [name for name in state if name not in model.names and name not in held]
        if foreign:
            raise MismatchError(f"the model lacks {first_of(foreign)} of the state; {_ADVICE}")
    with torch.no_grad():
        for name, tensor in (*(each[:2] for each in model.held()), *model.rest.items()):
            if name in known:
                _copy(tensor, known[name], name)


_ADVICE = "pass strict=False to load what fits"


def _with_synonyms(
    model: ModelState, state: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The state with a weight of several names under each of them; files may have only one."""
    synonyms = [[name, known] for name, known in model.aliases.items()]
    for module in model.modules.values():
        synonyms += [[model.name(*use) for use in tie.uses] for tie in declared(module)]
    found = dict(state)
    for names in synonyms:
        there = [name for name in names if name in found]
        if there:
            found |= {name: found[there[0]] for name in names if name not in found}
    return found


def _copy(tensor: torch.Tensor, value: torch.Tensor, name: str) -> None:
    if tensor.shape != value.shape:
        raise MismatchError(
            f"{name} is {list(tensor.shape)} in the model, but {list(value.shape)} in the state"
        )
    if is_sharded(tensor) and not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        # Every rank has the whole value, so nothing is sent.
        value = distribute_tensor(
            value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
    tensor.copy_(value)
