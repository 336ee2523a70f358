"""The demo, in a small size: what it shows, and that it ends when it is told to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "taktline", "demo"]


def shown(*words: str) -> str:
    command = [*COMMAND, "--steps", "3", "--microbatches", "2", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "schedules"),
    [
        ((), ["1f1b", "gpipe", "zbv"]),
        (("--local", "--schedule", "zb_h1"), ["zb_h1", "gpipe", "1f1b"]),
    ],
)
def test_what_it_shows(tmp_path: Path, words: tuple[str, ...], schedules: list[str]) -> None:
    page = tmp_path / "page.html"
    text = shown(*words, "--output", str(page))
    assert "The losses are equal, but for rounding." in text
    assert re.search(r"step +3 +loss \d\.\d+ +[\d,]+ tokens/s +bubble +\d+%", text)
    assert re.findall(r"^│ (\w+) +│ +\d │ +\d+ │ +\d+ │", text, re.M) == schedules
    assert str(page) in text
    assert text.count("Pipeline(") == 1, "one rank speaks for all"
    assert "<svg" in page.read_text() or "<script" in page.read_text()


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [*COMMAND, "--steps", "100000", "--output", str(tmp_path / "page.html")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where it is ignored, as in the background of a shell, children would ignore it as well.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("2. It trains"):
                break
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=60) != 0
        assert "Traceback" not in rest, rest
        assert not alive(process.pid)
    finally:
        process.stdout.close()
        if alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def alive(group: int) -> bool:
    """Whether a process of the group is left; one that has just ended may take a moment to go."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True


def test_a_schedule_that_does_not_exist() -> None:
    done = subprocess.run(
        [*COMMAND, "--schedule", "1f2b"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no schedule is called '1f2b'; did you mean 1f1b?" in done.stderr
