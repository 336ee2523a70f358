"""What saving and loading take: how many bytes are read, and how much memory is held."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import taktline as tl
from taktline.checkpoint import files
from taktline.meta import local
from tests.checkpoint.training import mesh_of
from tests.workers import Workers

WIDTH, LAYERS = 384, 8


def made(width: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    pipe: Any = tl.Pipeline(model, microbatches=2, loss_fn=nn.functional.mse_loss, **options)
    return pipe, torch.optim.AdamW(pipe.parameters())


def trained(width: int) -> tuple[Any, torch.optim.Optimizer]:
    pipe, optimizer = made(width)
    x = torch.ones(4, width)
    pipe.step(x, target=x)
    optimizer.step()
    optimizer.zero_grad()
    return pipe, optimizer


def bytes_read(rank: int, group: Any, folder: str, shape: Any, way: Any) -> tuple[int, int]:
    """How many bytes of files a rank looks at, and how many it needs."""
    mesh = mesh_of(group, shape)
    stages = mesh.size(0)
    cuts = [str(LAYERS // stages * stage) for stage in range(1, stages)]
    pipe, optimizer = made(WIDTH, cuts=cuts, mesh=mesh, data_parallel=way)
    read = 0

    def counted(data: Any, value: int = 0) -> int:
        nonlocal read
        read += len(data)
        return zlib.crc32(data, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "zlib", SimpleNamespace(crc32=counted))
        pipe.load(folder, optimizer)
    # A parameter, and two tensors of that size in AdamW.
    return read, 3 * sum(local(each.detach()).nbytes for each in pipe.parameters())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "shape", "way"),
    [(2, None, None), (4, None, None), (4, (2, 2), "fsdp"), (4, (2, 2), "ddp")],
    ids=["two", "four", "fsdp", "ddp"],
)
def test_bytes_read(workers: Workers, tmp_path: Path, ranks: int, shape: Any, way: Any) -> None:
    """From one process to several: fewer than twice what a rank needs."""
    pipe, optimizer = trained(WIDTH)
    pipe.save(tmp_path, optimizer)
    for read, needed in workers.run(bytes_read, str(tmp_path), shape, way, ranks=ranks):
        assert needed <= read < 2 * needed


def risen(do: Callable[[], object]) -> int:
    """By how many bytes the memory of this process has been above what it was."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    do()
    return _peak() - before


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory(tmp_path: Path) -> None:
    """No more than the process's part, which is there already, and one tensor."""
    width = 1024
    pipe, optimizer = trained(width)
    tensor = 4 * width**2
    pipe.save(tmp_path, optimizer)
    pipe.load(tmp_path, optimizer)
    assert risen(lambda: pipe.save(tmp_path, optimizer)) < 2 * tensor
    assert risen(lambda: pipe.load(tmp_path, optimizer)) < 2 * tensor
    fresh = torch.optim.AdamW(pipe.parameters())
    assert risen(lambda: pipe.load(tmp_path, fresh)) < (2 * LAYERS + 2) * tensor
