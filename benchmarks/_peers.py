"""Both runtimes on the same work: Taktline, and torch.distributed.pipelining as its peer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as peer
from torch import nn
from torch.multiprocessing.spawn import spawn

import taktline as tl

SCHEDULES: Mapping[str, int] = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
"""Each schedule, and the stages a rank that it is measured with."""

RUNTIMES = {"torch": peer, "taktline": tl}


def make_schedule(
    runtime: Any,
    name: str,
    rank: int,
    ranks: int,
    microbatches: int,
    layer: Callable[[], nn.Module],
    device: str = "cpu",
) -> tuple[Any, list[nn.Module], bool, bool]:
    """A schedule with this rank's stages; also these, and whether they hold the first and last."""
    per_rank = SCHEDULES[name]
    total = ranks * per_rank
    plan = tl.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
    mine = plan.placement.stages_of(rank)
    modules = [layer().to(device) for _ in mine]
    stages = [
        runtime.PipelineStage(module, index, total, torch.device(device))
        for index, module in zip(mine, modules, strict=True)
    ]
    schedule = getattr(runtime, name)(
        stages[0] if per_rank == 1 else stages, microbatches, loss_fn=nn.functional.mse_loss
    )
    return schedule, modules, 0 in mine, total - 1 in mine


def run_ranks(fn: Callable[..., None], ranks: int, *args: Any, backend: str = "gloo") -> None:
    """Run ``fn(rank, ranks, *args)`` on ranks of one process each."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        if ranks == 1:
            _rank(0, fn, ranks, store, args, backend)
        else:
            spawn(_rank, (fn, ranks, store, args, backend), nprocs=ranks)


def _rank(
    rank: int,
    fn: Callable[..., None],
    ranks: int,
    store: str,
    args: tuple[Any, ...],
    backend: str,
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":  # several ranks on one GPU, if each seems to have a host of its own
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
        os.environ |= {"NCCL_IB_DISABLE": "1"}
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        fn(rank, ranks, *args)
    finally:
        dist.destroy_process_group()
