"""What several tests of transports need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from taktline.transport.control_plane import Plane


@pytest.fixture
def planes() -> Iterator[list[Plane]]:
    """Three processes, as far as the plane knows."""
    store = HashStore()
    made = [Plane(store, process, 3, "test") for process in range(3)]
    yield made
    for plane in made:
        plane.close()
