"""What is trained in a pipeline and plainly, to compare: models with features, and usual ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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
from taktline.plan import Kind, Plan, Timeline
from taktline.runtime.stage_actions import seeded
from tests import models

CPU = torch.device("cpu")
Batch = tuple[tuple[Any, ...], dict[str, Any], Tensor]

SCHEDULES: Mapping[str, tuple[int, ...]] = {
    "ScheduleGPipe": (1,),
    "Schedule1F1B": (1,),
    "ScheduleInterleaved1F1B": (1, 2, 3),
    "ScheduleLoopedBFS": (1, 2, 3),
    "ScheduleInterleavedZeroBubble": (1, 2, 3),
    "ScheduleZBVZeroBubble": (2,),
    "ScheduleDualPipeV": (2,),
}
"""Each schedule, and the stages per rank to try it with."""


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
    seed: int | None = None
    scale_grads: bool = True
    by_rows: bool = True
    """Whether a micro-batch counts by its rows; else each counts the same."""

    def shares(self, targets: Sequence[Tensor]) -> list[float]:
        """How much each micro-batch counts."""
        weights: Any = self.options.get("loss_weights")
        if isinstance(weights, list | Tensor):
            found = [float(each) for each in weights]
        elif weights is not None:
            found = [float(weights(each)) for each in targets]
        else:
            by_rows = self.by_rows and self.scale_grads
            found = [float(len(each)) if by_rows else 1.0 for each in targets]
        return [each / sum(found) for each in found] if self.scale_grads else found


@dataclass(frozen=True)
class Case:
    """A usual model on a schedule of torch's names: steps (and evals) with batches of a size."""

    schedule: str
    ranks: int
    per_rank: int = 1
    microbatches: int = 4
    model: str = "mlp"
    calls: tuple[tuple[str, int], ...] = (("step", 8),)
    dropout: float = 0.0
    seed: int | None = None
    scale_grads: bool = True
    strict: bool = False
    device: str = "cpu"

    @property
    def stages(self) -> int:
        return self.ranks * self.per_rank

    @property
    def plan(self) -> Plan:
        return tl.build(
            self.schedule,
            ranks=self.ranks,
            microbatches=self.microbatches,
            stages_per_rank=self.per_rank,
        )

    @property
    def scenario(self) -> Scenario:
        def make(stages: int) -> list[nn.Sequential]:
            layers = models.make_layers(self.model, max(stages, 2), dropout=self.dropout)
            return models.cut(layers, stages)

        def batch(number: int, size: int) -> Batch:
            x, target = models.make_batch(self.model, size, seed=number)
            return (x,), {}, target

        loss, scaled = models.loss_fn(self.model), self.scale_grads
        return Scenario(make, batch, loss, self.calls, {}, self.seed, scaled, by_rows=False)

    def schedule_of(self, stages: list[tl.PipelineStage]) -> Any:
        single = self.schedule in ("ScheduleGPipe", "Schedule1F1B")
        return getattr(tl, self.schedule)(
            stages[0] if single else stages,
            self.microbatches,
            loss_fn=models.loss_fn(self.model),
            scale_grads=self.scale_grads,
            seed=self.seed,
        )

    def __str__(self) -> str:
        name = self.schedule.removeprefix("Schedule")
        return f"{name}-{self.model}-{self.ranks}x{self.per_rank}-{self.microbatches}mb"


@dataclass
class Result:
    """What a run gave; a rank has its own share of it."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    losses: list[list[Tensor]] = field(default_factory=list)
    aux_losses: list[list[Tensor]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    clock_error: float = 0.0


def plan_for(schedule: str, ranks: int, microbatches: int = 4) -> Plan:
    per_rank = min(2, SCHEDULES[schedule][-1])
    return tl.build(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)


def run_stages(
    rank: int,
    group: dist.ProcessGroup | None,
    scenario: Scenario,
    plan: Plan,
    device: torch.device = CPU,
    *,
    make: Callable[[list[tl.PipelineStage]], Any] | None = None,
    traced: bool = False,
    **options: Any,
) -> Result:
    """A scenario as one rank of a pipeline; ``make`` is for another schedule than the plan's."""
    torch.manual_seed(7)
    modules = [module.to(device) for module in scenario.make(plan.stages)]
    mine = plan.placement.stages_of(rank)
    stages = [tl.PipelineStage(modules[s], s, plan.stages, device, group=group) for s in mine]
    if make is None:
        options = {"seed": scenario.seed, "scale_grads": scenario.scale_grads, **options}
        schedule = tl.ScheduleFromPlan(stages, plan, scenario.loss, **options)
    else:
        schedule = make(stages)
    result = Result()
    with schedule.trace() if traced else nullcontext() as trace:
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
    if trace is not None:
        result.timelines, result.clock_error = trace.timelines, trace.clock_error
    for s in mine:
        named = modules[s].named_parameters()
        result.gradients |= {f"{s}.{n}": p.grad for n, p in named if p.grad is not None}
        result.buffers |= {f"{s}.{n}": b for n, b in modules[s].named_buffers()}
    return result


def run_local(scenario: Scenario, plan: Plan, **options: Any) -> list[Result]:
    return tl.local.run(lambda rank: run_stages(rank, None, scenario, plan, **options), plan.ranks)


def run_case(
    rank: int, group: dist.ProcessGroup | None, case: Case, traced: bool = False
) -> Result:
    """A case as one rank of a pipeline."""
    # In torch's schedules each micro-batch counts the same, which they say of uneven ones.
    warnings.filterwarnings("ignore", "micro-batches differ in size")  # until the test is over
    device, make = torch.device(case.device), case.schedule_of
    return run_stages(rank, group, case.scenario, case.plan, device, make=make, traced=traced)


def run_case_locally(case: Case, *, traced: bool = False) -> list[Result]:
    return tl.local.run(run_case, case.ranks, None, case, traced, strict=case.strict)


def check_case(ranks: Sequence[Result], case: Case) -> None:
    """Equal to the last bit to what the plain model gives."""
    assert_same(ranks, run_plain(case.scenario, case.plan, torch.device(case.device)))


def _on(device: torch.device, batch: Batch) -> Batch:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def run_plain(scenario: Scenario, plan: Plan, device: torch.device = CPU) -> Result:
    """The same without a pipeline: gradients of each micro-batch, added up in the plan's order."""
    torch.manual_seed(7)
    modules = [module.to(device) for module in scenario.make(plan.stages)]
    result, steps = Result(), 0
    parameters = {f"{s}.{n}": p for s, m in enumerate(modules) for n, p in m.named_parameters()}
    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    for number, (call, size) in enumerate(scenario.calls):
        torch.manual_seed(number)
        args, kwargs, target = _on(device, scenario.batch(number, size))
        count = min(plan.microbatches, size) if scenario.by_rows else plan.microbatches
        args_of, kwargs_of = tl.split_args_kwargs_into_chunks(args, kwargs, count)
        targets = target.tensor_split(count)
        found: list[dict[str, Tensor | None]] = []
        losses, aux, outputs = [], [], []
        for m, share in enumerate(scenario.shares(targets)):
            with torch.set_grad_enabled(call == "step"), tl.collect_losses() as added:
                key = None if scenario.seed is None else (scenario.seed, steps)
                output = forward(modules, args_of[m], kwargs_of[m], m, key, device)
                extra = scenario.options.get("loss_kwargs", {}) if call == "step" else {}
                loss = scenario.loss(output, targets[m], **extra)
                losses.append(loss.detach())
                if added:
                    aux.append(sum(loss.detach().reshape(()) for loss in added))
                outputs.append(pytree.tree_map_only(Tensor, Tensor.detach, output))
                if call == "step":
                    roots = [loss, *(one for one in added if one.requires_grad)]
                    shares = [(root, share) for root in roots if share]
                    found.append(gradients_of(shares, wanted) if shares else {})
        result.losses.append(losses)
        result.aux_losses.append(aux)
        result.outputs.append(tl.merge_chunks(outputs, None))
        if call == "step":
            steps += 1
            add_up(result.gradients, found, plan)
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


def add_up(
    totals: dict[str, Tensor], found: Sequence[Mapping[str, Tensor | None]], plan: Plan
) -> None:
    """Add up the gradients of each micro-batch, in the order of the plan's B and W."""
    for rank in range(plan.ranks):
        rows = plan.rows_of(rank)
        for kind, stage, m in zip(rows.kind, rows.stage, rows.microbatch, strict=True):
            if kind in (Kind.B, Kind.W) and m < len(found):
                for name, gradient in found[m].items():
                    if name.startswith(f"{stage}.") and gradient is not None:
                        totals[name] = totals[name] + gradient if name in totals else gradient


def forward(
    modules: Sequence[nn.Module],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    microbatch: int,
    key: tuple[int, int] | None,
    device: torch.device,
) -> Any:
    """One micro-batch through all stages; with a key, the seed and the step, random numbers too."""
    output: Any = args
    for stage, module in enumerate(modules):
        with nullcontext() if key is None else seeded((*key, stage, microbatch), device):
            output = module(*as_arguments(output), **kwargs)
    return output


def assert_same(ranks: Sequence[Result], plain: Result, *, exact: bool = True) -> None:
    """The ranks together gave what the plain model gave; the losses on every rank."""
    tolerance = (0.0, 0.0) if exact else (1e-5, 1e-7)
    close = partial(
        torch.testing.assert_close, rtol=tolerance[0], atol=tolerance[1], equal_nan=True
    )
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
