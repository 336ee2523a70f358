"""Processes for programs that import torch.distributed.pipelining, and a group without any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.workers import Workers


@pytest.fixture
def fake_group() -> Iterator[None]:
    """One rank, in the place of a process group."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def clients() -> Iterator[Workers]:
    """Two of their own: nothing of torch's package may have been imported in them before."""
    pool = Workers(size=2)
    try:
        yield pool
    finally:
        pool.stop()
