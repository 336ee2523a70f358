"""A new process group of the processes that go on, and the pipeline for so many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from taktline.errors import LostRankError, ScheduleError
from taktline.plan import Plan
from taktline.plan.partition import balance
from taktline.plan.units import contiguous
from taktline.private import private
from taktline.train.build import Built, is_file, plan_of
from taktline.transport.communicators import default_group
from taktline.transport.control_plane import Member, PeerFailure, Plane
from taktline.transport.distributed import Distributed
from taktline.transport.election import elect
from taktline.transport.sockets import Address

_FORM_SECONDS = 15.0
"""How long torch may take to connect the processes, once all of them have come."""

_abort = private(
    "torch.distributed.distributed_c10d._abort_process_group",
    "ending a group without waiting",
    dist.destroy_process_group,
)


def reform(plane: Plane, timeout: timedelta) -> list[int]:
    """Go on with the processes that are left, in a new default group; returns who is lost.

    All groups of torch end. The processes keep their numbers in the control plane.
    """
    stores: list[Any] = []

    def offer() -> Address:
        if not stores:
            stores.append(_store(plane.address[0], 0, is_master=True))
        return plane.address[0], stores[0].port, "", ""

    votes = elect(plane, plane.suspects(), offer, timeout.total_seconds())
    members, before = [vote.process for vote in votes], plane.numbers
    old = default_group()
    backend = dist.get_backend_config(old)
    if len(kinds := {each.partition(":")[2] for each in backend.split(",")}) == 1:
        backend = kinds.pop()
    plane.serve(old)  # not closed with it
    plane.generation = votes[0].round
    Distributed.forget_all()
    if "nccl" in backend:
        _abort()
    else:
        dist.destroy_process_group()
    _gather(plane, members, timeout)
    host, port, *_ = votes[0].store
    place = members.index(plane.process)
    try:
        store = stores[0] if not place else _store(host, port, is_master=False)
        dist.init_process_group(
            backend,
            store=PrefixStore(str(plane.generation), store),
            rank=place,
            world_size=len(members),
            timeout=timedelta(seconds=_FORM_SECONDS),
        )
    except (RuntimeError, ValueError) as error:
        raise LostRankError(f"the ranks {members} could not connect: {error}") from error
    default_group().set_timeout(timeout)
    plane.rewire(members)
    plane.numbers = members
    plane.serve(default_group())
    return [process for process in before if process not in members]


def _store(host: str, port: int, *, is_master: bool) -> Any:
    limit = timedelta(seconds=_FORM_SECONDS)
    made: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return made(host, port, None, is_master, limit, wait_for_workers=False)


def _gather(plane: Plane, members: Sequence[int], timeout: timedelta) -> None:
    """Wait until all have left their old groups: the waits of torch could not be ended."""
    if len(members) == 1:
        return
    member = Member(members, f"world/{plane.generation}", lambda _: None)
    plane.join(member)
    try:
        plane.meet(member, timeout.total_seconds())
    except PeerFailure as failure:
        raise LostRankError(f"rank {failure.processes[0]} was lost, too") from failure
    finally:
        plane.leave(member)


def fitted(given: Any, built: Built, left: Sequence[int]) -> SimpleNamespace:
    """The arguments of a pipeline, built before, for the ranks that are left.

    A whole model is cut anew. Stages that are given stay as they are, in 1F1B, several on a rank.
    """
    again, count = SimpleNamespace(**vars(given)), len(left)
    again.ranks = None
    again.device, again.microbatches = built.ranks.device, built.plan.microbatches
    for name in ("limits", "memory"):
        values = getattr(given, name)
        if isinstance(values, Sequence) and not isinstance(values, str):
            setattr(again, name, [values[rank] for rank in left])
    fixed = isinstance(given.schedule, Plan) or is_file(given.schedule)
    if not (fixed or given.cuts is not None or not given.is_whole):
        try:
            plan_of(again, count)
        except ScheduleError:  # it is "auto", or not for so many ranks
            again.schedule, again.stages_per_rank = "1f1b", None
        return again
    if given.is_whole and built.starts:
        again.cuts = list(built.starts)
    needs = built.table.needs
    costs = [1.0] * built.plan.stages if needs is None else [sum(need.work) for need in needs]
    again.schedule = contiguous(count, balance(costs, count).bounds, again.microbatches)
    return again


def release(given: Any, built: Built) -> None:
    """Move what is in no stage of this rank any more from its accelerator to the host."""
    modules = [given.model] if given.is_whole else given.model.values()
    kept = {id(tensor) for stage in built.model.modules.values() for tensor in _tensors(stage)}
    for tensor in (tensor for module in modules for tensor in _tensors(module)):
        if id(tensor) not in kept and tensor.device.type not in ("cpu", "meta"):
            tensor.data = tensor.data.cpu()


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
