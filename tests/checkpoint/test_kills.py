"""A few of the kills of ``python -m tests.checkpoint``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.documents import ROOT


@pytest.mark.processes
@pytest.mark.slow
def test_a_few_kills(commands: Path) -> None:
    """In a process of its own: it forks its ranks, which must not be done beside threads."""
    command = [commands / "python", "-m", "tests.checkpoint", "--kills", "3", "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout
    assert "0 unreadable saves, 0 other losses, 0 ranks that hung" in done.stdout
