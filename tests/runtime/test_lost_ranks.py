"""Ranks that end before there is a pipeline; those that die or stop later are in tests/faults."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

pytestmark = pytest.mark.processes

LOST = "is lost: its process has ended, or cannot be reached. Look at its output; restart all ranks"
SILENT = "is lost: the store of the process group, which it or a launcher keeps, does not answer"
ENDS_EARLY = """
import sys
from datetime import timedelta

import torch.distributed as dist
from torch import nn

import taktline as tl

rank, victim, where, how = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group(
    "gloo", init_method=where, rank=rank, world_size=3, timeout=timedelta(seconds=300)
)
if rank == victim:
    sys.exit("no model" if how == "fails" else 0)
if rank == 1 and how == "late":
    input()
try:
    tl.Pipeline(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), loss_fn=nn.MSELoss())
except tl.TaktlineError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("victim", "hosts", "how"),
    [(2, False, "ends"), (2, False, "late"), (1, True, "fails"), (0, True, "ends")],
)
def test_a_rank_that_ends_before_its_pipeline(
    commands: Path, tmp_path: Path, victim: int, hosts: bool, how: str
) -> None:
    """``hosts``: whether rank 0 keeps the store, which ends with it.

    A rank that comes when rank 0 has left, too, can then hear of that only. ``late``: rank 1 comes
    that late.
    """
    where = f"file://{tmp_path}/store"
    if hosts:
        with socket.create_server(("localhost", 0)) as free:
            where = f"tcp://localhost:{free.getsockname()[1]}"
    (script := tmp_path / "ends_early.py").write_text(ENDS_EARLY)
    told = [str(victim), where, how]
    ranks = [
        subprocess.Popen(
            [commands / "python", script, str(r), *told], stdin=PIPE, stdout=PIPE, text=True
        )
        for r in range(3)
    ]
    try:
        for rank in sorted({0, 1, 2} - {victim}):
            told = {victim, 0} if hosts and rank else {victim}
            answer = ranks[rank].communicate("go on\n", timeout=120)[0]
            errors = [f"LostRankError rank {each} {LOST}\n" for each in told]
            # Whoever asks the store just as rank 0 ends hears from the store's silence first.
            assert answer in errors or (0 in told and f"LostRankError rank 0 {SILENT}" in answer)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
