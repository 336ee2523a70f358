"""Processes that a launcher has started, of which one never makes its pipeline."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.documents import ROOT

PIPELINE = """
import torch, taktline as tl
tl.Pipeline([torch.nn.Linear(2, 2)] * 2, microbatches=2, timeout=200)
"""
WAITS = "input()"
LATE = WAITS + PIPELINE.replace("=200", "=2")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("import torch, taktline", "LostRankError: rank 1 has ended before it made a pipeline"),
        (LATE, "StallError: rank 1 of 2 made no pipeline within 0:00:0"),
        (WAITS, "StallError: rank 1 of 2 made no pipeline within 0:00:0"),
    ],
)
def test_a_process_without_a_pipeline_is_named(
    commands: Path, tmp_path: Path, other: str, told: str
) -> None:
    store = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=60))
    places = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    places |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    places["PYTHONPATH"] = str(ROOT)
    code = PIPELINE if "LostRank" in told else PIPELINE.replace("=200", "=2")
    # One that imports Taktline by itself is also to say by itself that it ends.
    python = sys.executable if "LostRank" in told else commands / "python"
    scripts = [tmp_path / "one.py", tmp_path / "two.py"]
    for script, text in zip(scripts, (code, other), strict=True):
        script.write_text(text)
    one, two = (
        subprocess.Popen(
            [python if rank else commands / "python", script],
            env=os.environ | places | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, script in enumerate(scripts)
    )
    try:
        assert told in one.communicate(timeout=100)[1]
        if other is LATE:
            assert told in two.communicate("go on\n", timeout=60)[1]
    finally:
        two.kill()
        two.communicate()
