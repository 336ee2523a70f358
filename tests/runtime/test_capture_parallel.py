"""Captured steps of stages in DDP, FSDP2 and ``replicate``: on the CPU, and on four nccl ranks."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.runtime.parallel import WRAPPERS, Case, Rank
from tests.runtime.scenarios import SCHEDULES
from tests.runtime.test_capture import Graphs, capture
from tests.workers import Workers

CALLS = (*("step",) * 4, *("update", "step") * 2, "step", "update", "eval", "step", "update")


def run_both(rank: int, group: dist.ProcessGroup, case: Case) -> tuple[list[str], bool]:
    """What a captured schedule does, and whether all is as in an eager one."""
    on_gpu = case.device == "cuda"
    eager, captured = Rank(group, case), Rank(group, case, cuda_graphs=on_gpu)
    graphs, same = Graphs(), True
    if not on_gpu:
        capture(captured.schedule, graphs)
    for number, name in enumerate(case.calls):
        ours, theirs = (each.call(name, number) for each in (captured, eager))
        same &= all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)
        mine, others = captured.gradients(), eager.gradients()
        same &= mine.keys() == others.keys()
        same &= all(torch.equal(mine[name], others[name]) for name in mine)
    return graphs.log or [str(captured.schedule._runner.captures)], same


def cases() -> list[Any]:
    found = {
        f"{name}-{schedule}": (Case(schedule, wrap, CALLS, "mlp"), number % 4 == turn)
        for number, schedule in enumerate(SCHEDULES)
        for turn, (name, wrap) in enumerate(WRAPPERS.items())
    }
    return [
        pytest.param(case, id=name, marks=() if taken else pytest.mark.matrix)
        for name, (case, taken) in found.items()
    ]


@pytest.mark.processes
@pytest.mark.parametrize("case", cases())
def test_as_in_eager_steps(workers: Workers, case: Case) -> None:
    for log, same in workers.run(run_both, case, ranks=4):
        assert same
        assert log.count("capture") == 1
        assert log.count("replay") == 5


def on_nccl(
    rank: int, wrapper: str, schedules: Sequence[str], port: int, results: SimpleQueue[Any]
) -> None:
    """One of four ranks on a GPU: each seems to have a host of its own."""
    os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    assert dist.group.WORLD is not None
    for schedule in schedules:
        case = Case(schedule, WRAPPERS[wrapper], CALLS, "mlp", device="cuda")
        (text,), same = run_both(rank, dist.group.WORLD, case)
        results.put((schedule, text, same))
    gc.collect()  # frees the graphs: nccl waits for those with its operations
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_as_in_eager_steps_over_nccl(wrapper: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    spawn(on_nccl, (wrapper, SCHEDULES, port, results), nprocs=4)
    for _ in range(4 * len(SCHEDULES)):
        schedule, text, same = results.get()
        assert same, schedule
        assert "captured, 5 replays" in text, (schedule, text)
