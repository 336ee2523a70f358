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


def _found(rank: int, group: dist.ProcessGroup) -> tuple[int, int, int]:
    """How many sockets were found before, with a group more, and with its thread unnamed."""
    before = len(gloo.every_socket())
    other = dist.new_group(list(range(group.size())), backend="gloo")
    assert isinstance(other, dist.ProcessGroup)
    dist.barrier(other)
    named = _sought(before + 1)
    for name in loop_names():
        name.write_text("python")
    unnamed = _sought(before + 1)
    dist.barrier(other)
    dist.destroy_process_group(other)
    return before, named, unnamed


def _sought(count: int) -> int:
    """How many are found, a little later if a thread is running just now."""
    for _ in range(100):
        if len(gloo.every_socket()) >= count:
            break
        time.sleep(0.01)
    return len(gloo.every_socket())


@pytest.mark.processes
@pytest.mark.skipif(not TASKS.exists(), reason="how threads wait is told by Linux alone")
def test_connections_are_found_whatever_gloo_calls_its_threads(workers: Workers) -> None:
    for before, named, unnamed in workers.run(_found, ranks=4):
        assert unnamed == named > before
