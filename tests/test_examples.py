"""The examples run, in a small size: in one process, and as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.documents import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES = ROOT / "examples"
CASES = {
    "gpt": (["--steps", "10", "--microbatches", "4"], 4, "step 10: loss"),
    "hugging_face": (["--steps", "2", "--layers", "2"], 2, "among them transformer.wte.weight"),
    "fsdp": (["--steps", "2"], 4, "step 2: loss"),
    "custom_schedule": (["--steps", "2"], 2, "step 2: loss"),
    "inference": (["--tokens", "2"], 2, "\nhij\n"),
}


def run(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(CASES)


@pytest.mark.parametrize("name", ["gpt", "inference"])
def test_in_one_process(name: str) -> None:
    words, _, text = CASES[name]
    assert text in run([sys.executable, str(EXAMPLES / f"{name}.py"), *words])


@pytest.mark.parametrize("name", ["hugging_face", "fsdp", "custom_schedule"])
def test_under_torchrun(name: str) -> None:
    words, ranks, text = CASES[name]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    shown = run([*launch, "--nproc-per-node", str(ranks), str(EXAMPLES / f"{name}.py"), *words])
    assert shown.count(text) == 1, "one rank speaks for all"
