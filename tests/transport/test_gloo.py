"""How gloo's connections are found, in groups that are not ours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from taktline.transport import gloo
from tests.workers import Workers

TASKS = Path("/proc/self/task")


def loop_names() -> Iterator[Path]:
    """Where the names of gloo's threads are."""
    for task in TASKS.iterdir():
        if (task / "comm").read_text().startswith("gloo"):
            yield task / "comm"


def _found(rank: int, group: dist.ProcessGroup) -> tuple[set[object], set[object], set[object]]:
    """What is found before, with one more group, and when its thread has no name of its own."""
    before = _sought()
    other = dist.new_group(list(range(group.size())), backend="gloo")
    assert isinstance(other, dist.ProcessGroup)
    dist.barrier(other)
    named = _sought()
    for name in loop_names():
        name.write_text("python")
    unnamed = _sought()
    dist.barrier(other)
    dist.destroy_process_group(other)
    return before, named, unnamed


def _sought() -> set[object]:
    """The ends of what is found in many looks: a thread may be running in one of them."""
    found: set[object] = set()
    for _ in range(50):
        found |= {(each.getsockname(), each.getpeername()) for each in gloo.connections()}
        time.sleep(0.005)
    return found


@pytest.mark.processes
@pytest.mark.skipif(not TASKS.exists(), reason="how threads wait is told by Linux alone")
def test_connections_are_found_whatever_gloo_calls_its_threads(workers: Workers) -> None:
    for before, named, unnamed in workers.run(_found, ranks=4):
        assert before < named
        assert unnamed == named
