"""Ctrl-C ends all ranks, wherever they are, and each says why."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import taktline as tl
from tests.workers import Workers

pytestmark = pytest.mark.processes

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
import taktline as tl

class Slow(nn.Linear):
    def forward(self, input):
        time.sleep(0.02)
        return super().forward(input)

def main(rank):
    torch.set_num_threads(1)
    stage = tl.PipelineStage(Slow(4, 4), rank, 2, torch.device("cpu"))
    schedule = tl.Schedule1F1B(stage, 4, nn.functional.mse_loss)
    x = torch.ones(8, 4)
    for number in range(100_000):
        schedule.step(x, target=x)
        if number == 2:
            print("runs", flush=True)

# Where it is ignored, as in the background of a shell, Python leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)
if len(sys.argv) > 2:
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    main(rank)
else:
    tl.local.run(main, 2)
"""


@pytest.mark.parametrize("ranks", ["local", "gloo"])
def test_ctrl_c_ends_all_ranks(ranks: str, commands: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    store = str(tmp_path / "store")
    told = [[store]] if ranks == "local" else [[store, str(rank)] for rank in range(2)]
    processes = [
        subprocess.Popen(
            [commands / "python", script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        for arguments in told
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "runs\n"
        for process in processes:  # as a terminal does
            process.send_signal(signal.SIGINT)
        said = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(process.returncode != 0 for process in processes)
    # A rank that waits for another may hear of its end first.
    assert any("KeyboardInterrupt" in text for text in said)
    assert all("KeyboardInterrupt" in text or "LostRankError" in text for text in said)


class Interrupted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        raise KeyboardInterrupt


@contextmanager
def lost_connections(*, finalizes: bool = True) -> Iterator[None]:
    """As gloo has it, when FSDP waits for its reductions at the end of a step."""
    try:
        yield
    finally:
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:64201")


def interrupted(rank: int, group: dist.ProcessGroup) -> str:
    layer = (Interrupted if rank else nn.Linear)(4, 4)
    stage = tl.PipelineStage(layer, rank, 2, torch.device("cpu"), group=group)
    schedule = tl.Schedule1F1B(stage, 4, nn.functional.mse_loss)
    x: Any = torch.ones(8, 4)
    if rank == 0:
        schedule._runner.replicas.step = lost_connections
    try:
        schedule.step(x, target=x)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_ends_a_step_from_outside_of_its_program_is_explained(workers: Workers) -> None:
    waiting, interrupts = workers.run(interrupted, ranks=2)
    assert interrupts == "KeyboardInterrupt: "
    assert waiting == (
        "LostRankError: rank 1 has raised KeyboardInterrupt in 1F0, and left the others behind"
    )
