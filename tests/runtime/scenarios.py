"""Models that hand all kinds of values from stage to stage, run in a pipeline and plainly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import taktline as tl
from taktline.meta import as_arguments
from taktline.plan import Plan
from tests.runtime.cases import SCHEDULES, add_up

CPU = torch.device("cpu")
Batch = tuple[tuple[Any, ...], dict[str, Any], Tensor]


@dataclass(frozen=True)
class Scenario:
    """A model in stages, and its batches."""

    make: Callable[[int], Sequence[nn.Module]]
    batch: Callable[[int, int], Batch]
    """The batch of a step, by its number and size: arguments, keywords (for all), target."""
    loss: Callable[..., Tensor] = F.mse_loss
    calls: tuple[tuple[str, int], ...] = (("eval", 8), ("step", 8), ("step", 8), ("step", 9))
    options: dict[str, Any] = field(default_factory=dict)
    """For each step."""


@dataclass
class Result:
    """What a run gave; a rank has its own share of it."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    losses: list[list[Tensor]] = field(default_factory=list)
    aux_losses: list[list[Tensor]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def plan_for(schedule: str, ranks: int, microbatches: int = 4) -> Plan:
    per_rank = min(2, SCHEDULES[schedule][-1])
    return tl.build(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)


def run_stages(
    rank: int,
    group: dist.ProcessGroup | None,
    scenario: Scenario,
    plan: Plan,
    device: torch.device = CPU,
    **options: Any,
) -> Result:
    """A scenario as one rank of a pipeline."""
    torch.manual_seed(7)
    modules = [module.to(device) for module in scenario.make(plan.stages)]
    mine = plan.placement.stages_of(rank)
    stages = [tl.PipelineStage(modules[s], s, plan.stages, device, group=group) for s in mine]
    schedule = tl.ScheduleFromPlan(stages, plan, scenario.loss, **options)
    result = Result()
    for number, (call, size) in enumerate(scenario.calls):
        torch.manual_seed(number)
        args, kwargs, target = _on(device, scenario.batch(number, size))
        losses: list[Tensor] = []
        aux: list[Tensor] = []
        extra = scenario.options if call == "step" else {}
        output = getattr(schedule, call)(
            *(args if 0 in mine else ()),
            target=target if plan.stages - 1 in mine else None,
            losses=losses,
            aux_losses=aux,
            share_losses=True,
            **kwargs,
            **extra,
        )
        result.losses.append(losses)
        result.aux_losses.append(aux)
        if output is not None:
            result.outputs.append(output)
    for s in mine:
        _collect(result, s, modules[s])
    return result


def _collect(result: Result, stage: int, module: nn.Module) -> None:
    named = list(module.named_parameters())
    result.gradients |= {f"{stage}.{n}": p.grad for n, p in named if p.grad is not None}
    result.buffers |= {f"{stage}.{n}": b for n, b in module.named_buffers()}


def run_local(scenario: Scenario, plan: Plan, **options: Any) -> list[Result]:
    return tl.local.run(lambda rank: run_stages(rank, None, scenario, plan, **options), plan.ranks)


def _on(device: torch.device, batch: Batch) -> Batch:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def run_plain(scenario: Scenario, plan: Plan, device: torch.device = CPU) -> Result:
    """The same without a pipeline: gradients of each micro-batch, added up in the plan's order."""
    torch.manual_seed(7)
    modules = [module.to(device) for module in scenario.make(plan.stages)]
    count, result = plan.microbatches, Result()
    parameters = {f"{s}.{n}": p for s, m in enumerate(modules) for n, p in m.named_parameters()}
    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    totals: dict[str, Tensor] = {}
    for number, (call, size) in enumerate(scenario.calls):
        torch.manual_seed(number)
        args, kwargs, target = _on(device, scenario.batch(number, size))
        args_of, kwargs_of = tl.split_args_kwargs_into_chunks(args, kwargs, count)
        found: list[dict[str, Tensor | None]] = []
        losses, aux, outputs = [], [], []
        for m, target_m in enumerate(target.tensor_split(count)):
            with torch.set_grad_enabled(call == "step"), tl.collect_losses() as added:
                output = forward(modules, args_of[m], kwargs_of[m])
                extra = scenario.options.get("loss_kwargs", {}) if call == "step" else {}
                loss = scenario.loss(output, target_m, **extra)
                losses.append(loss.detach())
                if added:
                    aux.append(sum(loss.detach().reshape(()) for loss in added))
                outputs.append(pytree.tree_map_only(Tensor, Tensor.detach, output))
                if call == "step":
                    roots = [loss, *(one for one in added if one.requires_grad)]
                    share = len(target_m) / len(target)
                    found.append(gradients_of([(root, share) for root in roots], wanted))
        result.losses.append(losses)
        result.aux_losses.append(aux)
        result.outputs.append(tl.merge_chunks(outputs, None))
        if call == "step":
            add_up(totals, found, plan)
    result.gradients = totals
    for s, module in enumerate(modules):
        result.buffers |= {f"{s}.{n}": b for n, b in module.named_buffers()}
    return result


def gradients_of(
    roots: Sequence[tuple[Tensor, float]], wanted: dict[str, nn.Parameter]
) -> dict[str, Tensor | None]:
    """The gradients of the roots, each of which counts so much."""
    gradients = torch.autograd.grad(
        [root for root, _ in roots],
        list(wanted.values()),
        [torch.full_like(root, scale) for root, scale in roots],
        allow_unused=True,
    )
    return dict(zip(wanted, gradients, strict=True))


def forward(modules: Sequence[nn.Module], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One micro-batch through all stages."""
    output: Any = args
    for module in modules:
        output = module(*as_arguments(output), **kwargs)
    return output


def assert_same(ranks: Sequence[Result], plain: Result, *, exact: bool = True) -> None:
    """The ranks together gave what the plain model gave; the losses on every rank."""
    tolerance = (0.0, 0.0) if exact else (1e-5, 1e-7)
    close = partial(torch.testing.assert_close, rtol=tolerance[0], atol=tolerance[1])
    gradients = {name: g for rank in ranks for name, g in rank.gradients.items()}
    buffers = {name: b for rank in ranks for name, b in rank.buffers.items()}
    assert gradients.keys() == plain.gradients.keys()
    close(gradients, plain.gradients)
    close(buffers, plain.buffers)
    for rank in ranks:
        assert len(rank.losses) == len(plain.losses)
        close(_on_cpu(rank.losses), _on_cpu(plain.losses))
        close(rank.aux_losses, _on_cpu(plain.aux_losses))
    outputs = [output for rank in ranks for output in rank.outputs]
    close(outputs, plain.outputs)


def _on_cpu(losses: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[loss.cpu() for loss in step] for step in losses]
