"""Wrappers in the hands of a stage: what they do when told, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel

from taktline.stage import PipelineStage
from taktline.stage.grad_sync import DDPSync, FSDPSync, GradSync, sync_of
from tests.runtime.parallel import (
    WRAPPERS,
    Log,
    Wrap,
    in_ddp,
    in_fsdp,
    in_parts,
    mesh_of,
)
from tests.workers import Workers

KINDS = {"ddp": DDPSync, "fsdp": FSDPSync, "nested_fsdp": FSDPSync, "replicate": FSDPSync}


def wrapped(group: dist.ProcessGroup, wrap: Wrap) -> tuple[Any, GradSync]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    module = wrap(layers.double(), mesh_of(group)["dp"])
    sync = sync_of(module)
    assert sync is not None
    assert sync.refusal() is None
    return module, sync


def run_find(rank: int, group: dist.ProcessGroup) -> dict[str, tuple[type, bool, list[list[int]]]]:
    found = {}
    for name, wrap in {**WRAPPERS, "parts": in_parts}.items():
        _, sync = wrapped(group, wrap)
        ranks = [dist.get_process_group_ranks(one) for one in sync.groups]
        found[name] = (type(sync), sync.shards, ranks)
    # Some trainers give a stage its wrapped module after it was made.
    stage = PipelineStage(nn.Sequential(nn.Linear(4, 4)), 0, 1, torch.device("cpu"))
    assert stage.grad_sync is None
    stage.submod = in_ddp(stage.submod, mesh_of(group)["dp"])  # pyright: ignore
    assert type(stage.grad_sync) is DDPSync
    return found


@pytest.mark.processes
def test_every_wrapper_is_found_with_the_ranks_that_it_averages_over(workers: Workers) -> None:
    kinds = KINDS | {"parts": FSDPSync}
    for rank, found in enumerate(workers.run(run_find, ranks=4)):
        ranks = [[0, 1], [2, 3]][rank // 2]
        assert found == {n: (kind, kind is FSDPSync, [ranks]) for n, kind in kinds.items()}


def run_stale(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The root of FSDP stays gathered after a forward; then somebody changes its parameters."""
    module, sync = wrapped(group, in_fsdp)
    x = torch.ones(2, 4, dtype=torch.float64)
    with torch.no_grad():
        module(x)
        module.reshard()
        parameters = list(module.parameters())
        module(x)
        for parameter in parameters:
            parameter.zero_()
        sync.begin()
        sync.unshard()
        fresh = module(x)
        sync.end()
    return fresh, torch.zeros_like(fresh)


@pytest.mark.processes
def test_what_was_gathered_before_a_step_is_gathered_anew(workers: Workers) -> None:
    for fresh, zeros in workers.run(run_stale, ranks=4):
        assert torch.equal(fresh, zeros)


class Sometimes(nn.Module):
    """One layer that all use, one that only the first replica uses, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.first, self.never = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.always(x)) if dist.get_rank() % 2 == 0 else self.always(x)


def run_unused(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    module = DistributedDataParallel(
        Sometimes(),
        process_group=mesh_of(group)["dp"].get_group(),
        find_unused_parameters=True,
        bucket_cap_mb=1e-5,  # pyright: ignore
    )
    sync = DDPSync([module])
    own = Sometimes()
    own.load_state_dict(module.module.state_dict())
    own(torch.ones(1, 2)).sum().backward()
    sync.begin()
    module(torch.ones(1, 2)).sum().backward()
    sync.reduce()
    sync.end()
    named = {name: p.grad for name, p in module.module.named_parameters()}
    return named | {f"own {name}": p.grad for name, p in own.named_parameters()}


@pytest.mark.processes
def test_parameters_that_only_some_replicas_use(workers: Workers) -> None:
    results = workers.run(run_unused, ranks=4)
    always = (results[0]["own always.weight"] + results[1]["own always.weight"]) / 2
    for found in results:
        torch.testing.assert_close(found["always.weight"], always)
        torch.testing.assert_close(found["first.weight"], results[0]["own first.weight"] / 2)
        assert found["never.weight"] is None


def run_buffers(rank: int, group: dist.ProcessGroup) -> list[Any]:
    """The buffers of both replicas at the forwards of two rounds."""
    module = DistributedDataParallel(
        nn.BatchNorm1d(2, momentum=1.0), process_group=mesh_of(group)["dp"].get_group()
    )
    sync, counts = DDPSync([module]), []
    for _ in range(2):
        with Log() as log:
            sync.begin()
            outputs = [module(torch.randn(4, 2) + rank) for _ in range(3)]
            for output in outputs:
                output.square().sum().backward()
            sync.reduce()
            sync.end()
        counts.append(log.counts())
    return counts


# As in DDP outside of a pipeline: those of the first replica, before what follows a reduction.
@pytest.mark.processes
def test_buffers_are_broadcast_once_before_each_reduction(workers: Workers) -> None:
    for counts in workers.run(run_buffers, ranks=4):
        assert [count["all_reduce"] for count in counts] == [1, 1]
        assert counts[0]["broadcast"] == counts[1]["broadcast"] > 0


def run_beside_ddp(rank: int, group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of three rounds that add up: reduced here, and by DDP itself."""
    gradients = []
    for ours in (True, False):
        torch.manual_seed(0)
        module = in_ddp(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), mesh_of(group)["dp"])
        sync = DDPSync([module])
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            x = torch.randn(2, 4, generator=generator)
            if ours:
                sync.begin()
            module(x).square().sum().backward()
            if ours:
                sync.reduce()
                sync.end()
        gradients.append([p.grad for p in module.parameters()])
    return gradients[0], gradients[1]


@pytest.mark.processes
def test_ddp_is_equalled_to_the_last_bit(workers: Workers) -> None:
    for ours, theirs in workers.run(run_beside_ddp, ranks=4):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


def run_together(rank: int, group: dist.ProcessGroup) -> int:
    """Modules that are sharded together, below a root of their own."""
    mesh = mesh_of(group)["dp"]
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([module[0], module[1]], mesh=mesh)
    sync = sync_of(fully_shard(module, mesh=mesh))  # pyright: ignore
    assert sync is not None
    assert sync.refusal() is None
    with Log() as log:
        sync.begin()
        sync.unshard()
        module(torch.ones(2, 4)).sum().backward()
        sync.reduce()
        sync.end()
    assert log.counts() == {"all_gather": 1, "reduce_scatter": 1}
    return len(log.events)


@pytest.mark.processes
def test_modules_that_are_sharded_together_communicate_together(workers: Workers) -> None:
    assert workers.run(run_together, ranks=4) == [2] * 4


def run_after_a_failure(rank: int, group: dist.ProcessGroup, wrap: Wrap) -> dict[str, int]:
    """A backward that fails, and a plain one after it, which nothing of the first may reach."""
    module, sync = wrapped(group, wrap)
    x = torch.ones(2, 4, dtype=torch.float64)

    def fail(_: Tensor) -> None:
        raise RuntimeError("out of luck")

    sync.begin()
    sync.unshard()
    output = module(x)
    output.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        (2 * output).sum().backward()
    sync.end()
    sync.forget()
    with Log() as log:
        module(x).sum().backward()
    return log.counts()


@pytest.mark.processes
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "nested_fsdp"])
def test_a_wrapper_works_as_ever_after_a_failure(workers: Workers, wrapper: str) -> None:
    for counts in workers.run(run_after_a_failure, WRAPPERS[wrapper], ranks=4):
        assert counts.keys() & {"all_reduce", "reduce_scatter"}


class Broken(dist.Work):
    """A gather that another rank has left."""

    def wait(self, timeout: Any = None) -> bool:
        raise RuntimeError("Connection closed by peer")


def run_after_a_lost_gather(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
    module, sync = wrapped(group, in_fsdp)
    x = torch.ones(2, 4, dtype=torch.float64)
    before = module(x).detach()
    assert isinstance(sync, FSDPSync)
    for each in sync._groups:
        gather: Any = SimpleNamespace(all_gather_event=None, all_gather_work=Broken())
        each._all_gather_result = gather
    sync.forget()
    return [before, module(x).detach()]


@pytest.mark.processes
@pytest.mark.skipif(
    not hasattr(FSDPState, "_reset_iter_state"), reason="before torch 2.13 nothing waits there"
)
def test_a_gather_that_was_left_is_forgotten(workers: Workers) -> None:
    for before, after in workers.run(run_after_a_lost_gather, ranks=4):
        assert torch.equal(before, after)
