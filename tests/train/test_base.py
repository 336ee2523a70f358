"""What a pipeline takes it gives back: when it is closed, and when it is dropped."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from taktline.errors import UseError
from tests.train.models import TARGET, TOKENS, pipeline
from tests.workers import Workers

FEW, MANY = 2, 5


def held() -> dict[str, int]:
    """Files, threads and groups of this process."""
    world: Any = dist.distributed_c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "groups": sum(map(len, tables)),
    }


def settled() -> dict[str, int]:
    """What is held once threads that are ending have ended."""
    now, before, same = held(), {}, 0
    while same < 5:
        time.sleep(0.1)
        gc.collect()
        now, before = held(), now
        same = same + 1 if now == before else 0
    return now


def many(rank: int, group: Any, way: str) -> tuple[dict[str, int], dict[str, int]]:
    """What is held after some pipelines, and after many."""
    counts: list[dict[str, int]] = []
    for number in range(1, MANY + 1):
        with pipeline(data_parallel=way) as pipe:
            pipe.step(TOKENS, target=TARGET)
        del pipe
        if number in (FEW, MANY):
            dist.barrier()
            counts.append(settled())
    return counts[0], counts[1]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_many_pipelines_hold_no_more_than_few(workers: Workers, way: str) -> None:
    for few, after in workers.run(many, way, ranks=4):
        grown = {kind: after[kind] - few[kind] for kind in few}
        assert max(grown.values()) < MANY - FEW, grown


def alone(rank: int, group: Any) -> tuple[str, float]:
    """One rank closes its pipeline, and goes on; groups that the user has made stay."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = pipeline(mesh=mesh, data_parallel="ddp")
    made = pipeline(data_parallel="ddp")
    for each in (pipe, made):
        each.step(TOKENS, target=TARGET)
    pipe.close()
    if rank == 0:
        made.close()
    total = torch.ones(())
    dist.all_reduce(total, group=mesh["dp"].get_group())
    dist.barrier()
    text = ""
    try:
        pipe.step(TOKENS, target=TARGET)
    except UseError as error:
        text = str(error)
    return text, total.item()


@pytest.mark.processes
def test_closing_waits_for_nobody_and_leaves_the_users_groups(workers: Workers) -> None:
    for text, total in workers.run(alone, ranks=4):
        assert text == "this pipeline was closed; make a new one"
        assert total == 2.0


def test_a_closed_pipeline() -> None:
    with pipeline() as pipe:
        loss = pipe.step(TOKENS, target=TARGET)
    pipe.close()
    assert loss.isfinite()
    assert repr(pipe) == str(pipe) == "Pipeline(closed)"
    calls: list[Callable[[], Any]] = [
        lambda: pipe.step(TOKENS, target=TARGET),
        lambda: pipe.eval(TOKENS),
        lambda: list(pipe.parameters()),
        pipe.grad_norm,
        pipe.state_dict,
        lambda: pipe.plan,
        lambda: pipe.device,
    ]
    for call in calls:
        with pytest.raises(UseError, match="this pipeline was closed; make a new one"):
            call()


def test_a_pipeline_is_neither_copied_nor_pickled() -> None:
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UseError, match=r"belongs to its process.*save pipe\.state_dict"):
            take(pipeline())
