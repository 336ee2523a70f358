"""Several ranks over nccl, on one GPU: each seems to have a host of its own."""

from __future__ import annotations

import copy
import os
import socket
from datetime import timedelta
from multiprocessing.queues import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import taktline as tl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

WIDTH, MICROBATCHES = 32, 4
STAGES = {"1f1b": 1, "zbv": 2}
"""How many stages each schedule has on a rank."""


def train(rank: int, ranks: int, schedule: str, port: int, results: SimpleQueue[bool]) -> None:
    """Whether losses and gradients are those of the plain model, to the last bit."""
    os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(rank % torch.cuda.device_count())
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "nccl",
        init_method=method,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    torch.manual_seed(0)
    count = ranks * STAGES[schedule]
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    plain = copy.deepcopy(nn.Sequential(*stages)).cuda()
    x = torch.randn(2 * MICROBATCHES, WIDTH, device="cuda")
    pipe = tl.Pipeline(
        stages,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        device="cuda",
    )
    same = True
    for number in range(8):  # in the first, shapes are learned; in the first five, data is compared
        torch.cuda.set_sync_debug_mode("error" if number > 5 else "default")  # then nothing waits
        loss = pipe.step(x, target=x)
        torch.cuda.set_sync_debug_mode("default")
        total = torch.zeros((), device="cuda")
        for part in x.chunk(MICROBATCHES):
            each = nn.functional.mse_loss(plain(part), part) / MICROBATCHES
            each.backward()
            total += each.detach()
        same &= loss.is_cuda and torch.allclose(loss, total)
    for stage, module in pipe.stages.items():
        expected = plain.get_submodule(str(stage)).parameters()
        for found, wanted in zip(module.parameters(), expected, strict=True):
            same &= found.grad is not None and torch.equal(found.grad, wanted.grad)  # pyright: ignore
    results.put(same)
    pipe.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", STAGES)
def test_gradients_equal_those_of_the_plain_model(schedule: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    spawn(train, (2, schedule, port, results), nprocs=2)
    assert [results.get() for _ in range(2)] == [True, True]
