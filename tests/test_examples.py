"""The examples run, in a small size, and come to the same in one process and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import pytest

from tests.documents import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES = ROOT / "examples"
CASES = {
    "gpt": (["--steps", "10", "--microbatches", "4"], 4, "step 10: loss"),
    "hugging_face": (["--steps", "4", "--layers", "2"], 2, "among them transformer.wte.weight"),
    "fsdp": (["--steps", "2"], 4, "step 2: loss"),
    "custom_schedule": (["--steps", "2"], 2, "step 2: loss"),
    "inference": (["--tokens", "2"], 2, "\nhij\n"),
    "resumable": (["--steps", "4"], 2, "step 4: loss"),
}


def run(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=environment,
            cwd=folder,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(shown: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\S+?)(?:,|$)", shown, re.M)]


def test_every_example_is_tested() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_same_in_one_process_and_under_torchrun(name: str) -> None:
    words, ranks, text = CASES[name]
    command = [str(EXAMPLES / f"{name}.py"), *words]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(ranks)]
    with ThreadPoolExecutor() as both:
        alone, shown = both.map(run, [[sys.executable, *command], [*launch, *command]])
    assert text in alone
    assert shown.count(text) == 1, "one rank speaks for all"
    # As printed, with three places or more; the last one may be rounded otherwise.
    assert losses(shown) == pytest.approx(losses(alone), rel=1e-3)
    assert bool(losses(alone)) == (name != "inference")


def test_a_training_that_goes_on_by_itself() -> None:
    """A rank is killed in step 7; torchrun starts anew, and all goes on from the latest save."""
    command = [str(EXAMPLES / "resumable.py"), "--steps", "10"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    killed = [*launch, "--nproc-per-node", "2", *command, "--die-in", "7"]
    with ThreadPoolExecutor() as both:
        calm, shown = both.map(run, [[sys.executable, *command], killed])
    steps = [dict(re.findall(r"step (\d+): (loss \S+)", text)) for text in (calm, shown)]
    assert steps[0] == steps[1], "to the last place"
    assert shown.count("step 7: ") + shown.count("step 8: ") > 2, "some were made twice"
