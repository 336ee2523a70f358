"""Pipelines under torch's names × data or tensor parallelism, however their steps are run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from taktline.compat import torch_pipelining
from taktline.compat.torch_pipelining import schedules
from taktline.compat.torch_pipelining.stage import PipelineStage
from tests.compat.programs import CPU, Unsplit, loss_fn, make_batch, make_layers, wrapped
from tests.runtime.parallel import (
    WRAPPERS,
    Case,
    Outcome,
    Rank,
    assert_like_plain,
    mesh_of,
    whole,
)
from tests.workers import Workers

pytestmark = pytest.mark.processes

# Steps that add up, an update after which all must be gathered anew, and evaluation in between.
CALLS = ("eval", "step", "update", "eval", "step", "step")


def _cases(rank: int, group: dist.ProcessGroup, cases: list[Case], ours: bool) -> list[Outcome]:
    outcomes = []
    for case in cases:
        mine = Rank(group, case, names=torch_pipelining)
        for stage in mine.stages:
            if not ours:
                wrapped(stage)
        losses = [mine.call(name, number) for number, name in enumerate(case.calls)]
        assert mine.schedule._on_ours is ours  # pyright: ignore[reportAttributeAccessIssue]
        outcomes.append((mine.gradients(), losses))
    return outcomes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_equal_those_of_the_plain_model(
    workers: Workers, wrapper: str, ours: bool
) -> None:
    names = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
    cases = [Case(name, WRAPPERS[wrapper], CALLS, "mlp") for name in names]
    found = workers.run(_cases, cases, ours, ranks=4)
    for number, case in enumerate(cases):
        assert_like_plain([outcomes[number] for outcomes in found], case)


def _tensor_parallel(rank: int, group: dist.ProcessGroup, ours: bool) -> None:
    mesh = mesh_of(group, ((2, 2), ("pp", "tp")))
    here = mesh["pp"].get_local_rank()
    for name in ("Schedule1F1B", "ScheduleInterleavedZeroBubble"):
        single = name == "Schedule1F1B"
        mine = [here] if single else [here, here + 2]
        layers = make_layers(2 if single else 4)
        unsplit = Unsplit(layers)
        halves = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        for index in mine:
            parallelize_module(layers[index], mesh["tp"], halves)
        count, pipeline = len(layers), mesh["pp"].get_group()
        stages = [PipelineStage(layers[i], i, count, CPU, group=pipeline) for i in mine]
        for stage in stages:
            if not ours:
                wrapped(stage)
        schedule = getattr(schedules, name)(stages[0] if single else stages, 4, loss_fn=loss_fn)
        x, target = make_batch()
        last = {"target": target} if mine[-1] == len(layers) - 1 else {}
        schedule.step(*([x] if here == 0 else []), **last)
        assert schedule._on_ours is ours
        for index in mine:
            expected = dict(unsplit.layers[index].named_parameters())
            for key, parameter in layers[index].named_parameters():
                torch.testing.assert_close(whole(parameter.grad), expected[key].grad)


@pytest.mark.parametrize("ours", [True, False])
def test_tensor_parallel_stages(workers: Workers, ours: bool) -> None:
    workers.run(_tensor_parallel, ours, ranks=4)
