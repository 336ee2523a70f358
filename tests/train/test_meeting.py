"""Processes that a launcher has started, of which one never makes its pipeline."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.documents import ROOT

PIPELINE = """
import torch, taktline as tl
tl.Pipeline([torch.nn.Linear(2, 2)] * 2, microbatches=2, timeout=200)
"""
LATE = "import time; time.sleep(12)" + PIPELINE.replace("=200", "=2")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("import torch, taktline", "LostRankError: rank 1 has ended before it made a pipeline"),
        (LATE, "StallError: rank 1 of 2 made no pipeline within 0:00:0"),
        ("import time; time.sleep(60)", "StallError: rank 1 of 2 made no pipeline within 0:00:0"),
    ],
)
def test_a_process_without_a_pipeline_is_named(other: str, told: str) -> None:
    store = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=60))
    places = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    places |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    places["PYTHONPATH"] = str(ROOT)
    code = PIPELINE if "LostRank" in told else PIPELINE.replace("=200", "=2")
    one, two = (
        subprocess.Popen(
            [sys.executable, "-c", each],
            env=os.environ | places | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, each in enumerate((code, other))
    )
    try:
        assert told in one.communicate(timeout=100)[1]
        if other is LATE:
            assert told in two.communicate(timeout=60)[1]
    finally:
        two.kill()
        two.communicate()
