"""The same on a GPU: several local ranks share one, and nccl runs where it can."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import taktline as tl
from taktline.transport import Channel
from taktline.transport.distributed import Distributed
from tests.runtime.features import FEATURES
from tests.runtime.scenarios import (
    SCHEDULES,
    Case,
    assert_same,
    check_case,
    plan_for,
    run_case,
    run_case_locally,
    run_local,
    run_plain,
)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed by deterministic algorithms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CALLS = (("eval", 8), ("step", 8), ("step", 8), ("eval", 9), ("step", 11))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """The gradients of embeddings and of attention are added up in any order otherwise."""
    torch.zeros(1, device="cuda")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("model", ["mlp", "gpt", "llama"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_local_ranks_on_one_gpu(schedule: str, model: str, strict: bool) -> None:
    per_rank = SCHEDULES[schedule][-1]
    case = Case(schedule, 2, per_rank, 4, model, CALLS, strict=strict, device="cuda")
    check_case(run_case_locally(case), case)


NAMES = ("several", "nested", "layouts", "low precision", "twice", "dropped")
NAMES += ("unet", "skip, checkpointed", "far skip", "loss", "loss, checkpointed")
SCENARIOS = {name: FEATURES[name] for name in NAMES}
"""Looked up here, so that a name that has gone is noticed without a GPU, too."""


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_on_one_gpu(schedule: str, name: str) -> None:
    scenario, plan = SCENARIOS[name], plan_for(schedule, 2)
    device, dynamic = torch.device("cuda"), name == "dropped"
    found = run_local(scenario, plan, device=device, dynamic_shapes=dynamic)
    assert_same(found, run_plain(scenario, plan, device), exact=False)


def test_seeded_dropout() -> None:
    case = Case(
        "Schedule1F1B", 2, 1, 4, "gpt", (("step", 8),) * 2, dropout=0.5, seed=1, device="cuda"
    )
    check_case(run_case_locally(case), case)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_step_waits_for_nothing(schedule: str, ranks: int) -> None:
    stages = [nn.Linear(8, 8) for _ in range(ranks * (2 if schedule == "zbv" else 1))]
    pipe = tl.Pipeline(
        stages, schedule=schedule, microbatches=3, ranks=ranks, loss_fn=F.mse_loss, device="cuda"
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), foreach=True, capturable=True)
    x, losses = torch.randn(8, 8, device="cuda"), []  # of which micro-batches differ in size
    for number in range(7):  # in the first five, data may be compared
        torch.cuda.set_sync_debug_mode("error" if number > 4 else "default")
        try:
            losses.append(pipe.step(x, target=x))
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(loss.is_cuda for loss in losses)
    assert losses[-1] < losses[0]


@pytest.fixture
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


def test_one_rank_over_nccl(nccl: dist.ProcessGroup) -> None:
    """One alone; several are in test_nccl.py."""
    case = Case("ScheduleInterleavedZeroBubble", 1, 3, 4, "gpt", CALLS, device="cuda")
    check_case([run_case(0, nccl, case)], case)
    transport = Distributed.of(nccl, torch.device("cuda"))
    assert transport.exchange([1, 2]) == [[1, 2]]
    transport.open([Channel(1, 2, False)])  # not of this rank: nothing to do
