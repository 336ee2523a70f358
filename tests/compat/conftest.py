"""Processes for programs that import torch.distributed.pipelining and are to get ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers import Workers


@pytest.fixture(scope="session")
def clients() -> Iterator[Workers]:
    """Two of their own: nothing of torch's package may have been imported in them before."""
    pool = Workers(size=2)
    try:
        yield pool
    finally:
        pool.stop()
