"""Steps on the real ranks before, or beside, training: traced for their costs, or timed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from taktline.device import keep_generators
from taktline.errors import LossError
from taktline.plan import Placement, Plan, Timeline
from taktline.plan.units import Units, measured, one_by_one
from taktline.runtime import ScheduleFromPlan
from taktline.runtime.introduction import together
from taktline.runtime.microbatch import Batch, Cutter
from taktline.split import materialise
from taktline.split.steps import all_tensors, arguments_of
from taktline.stage import PipelineStage
from taktline.stage.offload import copies_on
from taktline.train.batches import on_device
from taktline.train.ranks import Ranks

_WARM, _TRACED, _TIMED = 2, 3, 5
"""How many steps find memory, are traced, and are timed."""
_ALONE = 4
"""The micro-batches of a step in which one rank computes at a time."""


@dataclass(frozen=True, slots=True)
class Batches:
    """The micro-batches of a step, and its loss."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any]
    loss_fn: Callable[..., torch.Tensor]

    @classmethod
    def of(cls, given: Any, microbatches: int, device: torch.device, *, cut: bool) -> Batches:
        """The example as each micro-batch; or cut into them, as a batch.

        ``given`` has the example, its target, the loss function and how a batch is cut.
        """
        args, kwargs = on_device(arguments_of(given.example), device)
        target = on_device(given.example_target, device)
        loss = training_loss(given.loss_fn, has_target=target is not None)
        if not cut:
            m = microbatches
            return cls([args] * m, [kwargs] * m, [target] * m, loss)
        batch = Batch(args, kwargs, target)
        specs = (given.args_chunk_spec, given.kwargs_chunk_spec, given.target_chunk_spec)
        batch.cutter = Cutter(microbatches, *specs)
        rows, args_mbs, kwargs_mbs = batch.cut()
        targets = [*(batch.targets(rows) or [None] * microbatches)]
        return cls([*map(tuple, args_mbs)], [*map(dict, kwargs_mbs)], targets, loss)

    def repeated(self, count: int) -> Batches:
        """So many of them, the first ones again if there are fewer."""
        places = [place % len(self.args) for place in range(count)]
        args, kwargs = [self.args[at] for at in places], [self.kwargs[at] for at in places]
        return Batches(args, kwargs, [self.targets[at] for at in places], self.loss_fn)


def training_loss(loss_fn: Any, *, has_target: bool) -> Callable[..., Any]:
    """The loss of a step: that of training, or a plain mean where its target is not known."""

    def loss(output: Any, target: Any) -> torch.Tensor:
        if has_target:
            return loss_fn(output, target)
        found = [x for x in all_tensors(output) if x.requires_grad]
        own = next((x for x in found if x.numel() == 1), None)
        if own is None and not found:
            raise LossError("the output for the example has no gradient: no step can be measured")
        return torch.stack([x.float().mean() for x in found]).sum() if own is None else own

    return loss


@contextmanager
def scheduled(
    modules: Mapping[int, nn.Module], plan: Plan, ranks: Ranks, batches: Batches
) -> Iterator[tuple[ScheduleFromPlan, Callable[[], Any]]]:
    """A schedule of a plan for the stages of this process, warm, and its step."""
    count, device, group = plan.stages, ranks.device, ranks.group
    stages = [PipelineStage(modules[s], s, count, device, group=group) for s in modules]
    schedule = ScheduleFromPlan(stages, plan, batches.loss_fn)
    if len(ranks.own) > 1:
        schedule._runner.run_all_ranks(ranks.size)
    schedule._runner.connect()
    given = batches.repeated(plan.microbatches)

    def step() -> None:
        schedule.step(
            arg_mbs=given.args,
            kwarg_mbs=given.kwargs,
            target_mbs=given.targets,
            return_outputs=False,
        )

    with keep_generators([device]):
        for _ in range(_WARM):
            step()
        yield schedule, step


def traced(
    modules: Mapping[int, nn.Module], plan: Plan, ranks: Ranks, batches: Batches
) -> list[Timeline]:
    """The timelines of some steps; all ranks take part."""
    with scheduled(modules, plan, ranks, batches) as (schedule, step):
        with schedule.trace() as trace:
            for _ in range(_TRACED):
                step()
        return trace.timelines


def timed(
    modules: Mapping[int, nn.Module], plan: Plan, ranks: Ranks, batches: Batches
) -> list[float]:
    """The milliseconds of some steps on this rank; all ranks take part."""
    with scheduled(modules, plan, ranks, batches) as (_, step):
        return [waited(step, ranks) for _ in range(_TIMED)]


def waited(step: Callable[[], object], ranks: Ranks) -> float:
    """The milliseconds of a step until all ranks have computed it."""
    _wait(ranks)
    begin = time.perf_counter()
    step()
    _wait(ranks)
    return 1e3 * (time.perf_counter() - begin)


def _wait(ranks: Ranks) -> None:
    """Until this rank has computed everything, and all others are here."""
    if ranks.device.type != "cpu":
        torch.get_device_module(ranks.device).synchronize(ranks.device)
    ranks.transport.exchange([0], "the time of a step")


def units_of(modules: Mapping[int, nn.Module], plan: Plan, ranks: Ranks, batches: Batches) -> Units:
    """The costs of the stages of a plan; each process has its own of them."""
    alone = traced(modules, one_by_one(plan.placement, _ALONE), ranks, batches)
    steps = traced(modules, plan, ranks, batches)
    return measured(alone, steps, local=ranks.in_one_process)


def copies(
    given: SimpleNamespace, stages: Sequence[nn.Module], placement: Placement, ranks: Ranks
) -> dict[int, nn.Module]:
    """Copies of the stages of this process on its device, prepared like those that will train."""
    own = [stage for rank in ranks.own for stage in placement.stages_of(rank)]

    def made() -> dict[int, nn.Module]:
        found = dict(zip(own, copy.deepcopy([stages[s] for s in own]), strict=True))
        for stage, module in found.items():
            module.zero_grad()
            found[stage] = materialise(module, ranks.device)
            if given.prepare is not None:
                found[stage] = given.prepare(found[stage], stage)
        return found

    return together(ranks, made)


@cache
def speeds(device: torch.device) -> tuple[float, float]:
    """Counted operations, and copied bytes, of a device in a second."""
    is_cuda = device.type == "cuda"
    size, nbytes = (8192, 1 << 28) if is_cuda else (512, 1 << 24)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    matrix, copies = torch.ones(size, size, dtype=dtype, device=device), copies_on(device)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_cuda)

    def seconds(call: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(4):
            began = time.perf_counter()
            call()
            if is_cuda:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        return min(times)

    product = seconds(lambda: matrix @ matrix)
    copy = seconds(lambda: copies.wait(copies.copy([(host, there)], inward=False)))
    return 2 * size**3 / product, nbytes / copy
