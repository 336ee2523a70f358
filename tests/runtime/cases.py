"""Training runs to compare: the same on every transport, and plainly on one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import taktline as tl
from taktline.plan import Kind, Plan
from taktline.runtime.stage_actions import seeded
from tests import models

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
class Case:
    """A model, a schedule, and what is done with them: steps (and evals) with batches of a size."""

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

    def __str__(self) -> str:
        name = self.schedule.removeprefix("Schedule")
        return f"{name}-{self.model}-{self.ranks}x{self.per_rank}-{self.microbatches}mb"


@dataclass
class Result:
    """What a run gave; a rank has its own share of it."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: list[list[Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


def stage_modules(case: Case) -> list[nn.Sequential]:
    layers = models.make_layers(case.model, max(case.stages, 2), dropout=case.dropout)
    return [module.to(case.device) for module in models.cut(layers, case.stages)]


def make_batch(case: Case, number: int, size: int) -> tuple[Tensor, Tensor]:
    x, target = models.make_batch(case.model, size, seed=number)
    return x.to(case.device), target.to(case.device)


def named(stage: int, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        yield f"{stage}.{name}", parameter


def make_schedule(case: Case, stages: list[tl.PipelineStage], source: Any = tl) -> Any:
    """The schedule of a case, ours or (from another module) one with the same names."""
    single = case.schedule in ("ScheduleGPipe", "Schedule1F1B")
    options = {} if case.seed is None else {"seed": case.seed}
    return getattr(source, case.schedule)(
        stages[0] if single else stages,
        case.microbatches,
        loss_fn=models.loss_fn(case.model),
        scale_grads=case.scale_grads,
        **options,
    )


def plan_of(case: Case) -> Plan:
    return tl.build(
        case.schedule,
        ranks=case.ranks,
        microbatches=case.microbatches,
        stages_per_rank=case.per_rank,
    )


def run_pipelined(
    rank: int, group: dist.ProcessGroup | None, case: Case, source: Any = tl
) -> Result:
    """A case as one rank of a pipeline."""
    # In torch's schedules each micro-batch counts the same, which they say of uneven ones.
    warnings.filterwarnings("ignore", "micro-batches differ in size")  # until the test is over
    modules, device = stage_modules(case), torch.device(case.device)
    mine = plan_of(case).placement.stages_of(rank)
    stages = [source.PipelineStage(modules[s], s, case.stages, device, group=group) for s in mine]
    schedule = make_schedule(case, stages, source)
    result = Result()
    for number, (call, size) in enumerate(case.calls):
        x, target = make_batch(case, number, size)
        losses: list[Tensor] = []
        output = getattr(schedule, call)(
            *((x,) if 0 in mine else ()),
            target=target if case.stages - 1 in mine else None,
            losses=losses,
        )
        if output is not None:
            result.outputs.append(output)
            result.losses.append([loss.detach() for loss in losses])
    for s in mine:
        result.gradients |= {n: p.grad for n, p in named(s, modules[s]) if p.grad is not None}
    return result


def run_local(case: Case) -> list[Result]:
    return tl.local.run(run_pipelined, case.ranks, None, case, strict=case.strict)


def run_plain(case: Case) -> Result:
    """The same on the whole model: micro-batches one by one, gradients added in the plan's order.

    A stage adds up what each of its B or W gives, as ``backward()`` would.
    """
    modules, plan, result = stage_modules(case), plan_of(case), Result()
    scale = 1 / case.microbatches if case.scale_grads else 1.0
    parameters = {n: p for s, module in enumerate(modules) for n, p in named(s, module)}
    steps = 0
    for number, (call, size) in enumerate(case.calls):
        x, target = make_batch(case, number, size)
        found: list[Mapping[str, Tensor | None]] = []
        losses, outputs = [], []
        for m, (x_m, target_m) in enumerate(
            zip(
                x.tensor_split(case.microbatches),
                target.tensor_split(case.microbatches),
                strict=True,
            )
        ):
            with torch.set_grad_enabled(call == "step"):
                output = _forward(modules, x_m, case, steps, m)
                loss = models.loss_fn(case.model)(output, target_m)
            losses.append(loss.detach())
            outputs.append(output.detach())
            if call == "step":
                root = torch.full_like(loss, scale)
                gradients = torch.autograd.grad(loss, list(parameters.values()), root)
                found.append(dict(zip(parameters, gradients, strict=True)))
        result.losses.append(losses)
        result.outputs.append(torch.cat(outputs))
        if call == "step":
            steps += 1
            add_up(result.gradients, found, plan)
    return result


def _forward(modules: list[nn.Sequential], x: Tensor, case: Case, step: int, m: int) -> Tensor:
    for stage, module in enumerate(modules):
        if case.seed is None:
            x = module(x)
        else:
            with seeded((case.seed, step, stage, m), torch.device(case.device)):
                x = module(x)
    return x


def add_up(
    totals: dict[str, Tensor], found: Sequence[Mapping[str, Tensor | None]], plan: Plan
) -> None:
    """Add up the gradients of each micro-batch, in the order of the plan's B and W."""
    for rank in range(plan.ranks):
        rows = plan.rows_of(rank)
        for kind, stage, m in zip(rows.kind, rows.stage, rows.microbatch, strict=True):
            if kind in (Kind.B, Kind.W):
                for name, gradient in found[m].items():
                    if name.startswith(f"{stage}.") and gradient is not None:
                        totals[name] = totals[name] + gradient if name in totals else gradient


def merge(results: list[Result]) -> Result:
    """The shares of all ranks together."""
    whole = Result()
    for result in results:
        whole.gradients |= result.gradients
        whole.losses += result.losses
        whole.outputs += result.outputs
    return whole


def assert_same(actual: Result, expected: Result) -> None:
    """Equal to the last bit."""
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(actual.gradients[name], gradient), name
    assert len(actual.losses) == len(expected.losses)
    for ours, theirs in zip(actual.losses, expected.losses, strict=True):
        assert torch.equal(torch.stack(ours), torch.stack(theirs))
    for ours, theirs in zip(actual.outputs, expected.outputs, strict=True):
        assert torch.equal(ours, theirs)
