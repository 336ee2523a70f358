"""Runs a case: as ranks of a pipeline, and plainly."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import taktline as tl
from taktline.errors import DeadlockError
from taktline.meta import as_arguments
from taktline.runtime.agreement import scales
from taktline.runtime.stage_actions import seeded
from tests.runtime.scenarios import CPU, add_up, gradients_of
from tests.torture.case import Call, Case, Fault
from tests.torture.plans import order_of_forwards


@dataclass
class Record:
    """What one call gave."""

    error: Exception | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    aux_losses: list[Tensor] = field(default_factory=list)
    output: Any = None


class Tripped(Exception):
    """The fault that was asked for."""


class _Trip(torch.autograd.Function):
    """Hands on a tensor, and fails in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, text: str) -> Tensor:
        ctx.text = text
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise Tripped(ctx.text)


class Wired(nn.Module):
    """A stage that fails where it is told to."""

    def __init__(self, module: nn.Module, stage: int, order: Sequence[int]) -> None:
        super().__init__()
        self.module = module
        self.stage = stage
        self.order = order
        self.arm(())

    def arm(self, faults: Sequence[Fault]) -> None:
        """Begin a call."""
        self.faults = {(f.where, f.microbatch): f for f in faults if f.stage == self.stage}
        self.calls = {"forward": 0, "loss": 0}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = self.passes("forward")
        output = self.module(*args, **kwargs)
        fault = self.faults.get(("backward", microbatch))
        if fault is None:
            return output
        return pytree.tree_map_only(
            Tensor,
            lambda x: _Trip.apply(x, f"{fault}{fault.words}") if x.requires_grad else x,
            output,
        )

    def passes(self, where: str) -> int:
        """Fail, if it is time to; returns the micro-batch."""
        microbatch = self.order[self.calls[where]]
        self.calls[where] += 1
        self.trip(where, microbatch)
        return microbatch

    def trip(self, where: str, microbatch: int) -> None:
        """Fail, if it is time to."""
        fault = self.faults.get((where, microbatch))
        if fault is not None:
            raise Tripped(f"{fault}{fault.words}")


def run_rank(rank: int, group: dist.ProcessGroup | None, case: Case) -> list[Record]:
    """A case as one rank of it."""
    with warnings.catch_warnings():
        # Plans that need asynchronous sends are among those that have to work.
        warnings.filterwarnings("ignore", message="plan .* can deadlock where a send waits")
        warnings.filterwarnings("ignore", message="micro-batches differ in size")
        return _Rank(rank, group, case).run()


def run_local(rank: int, group: dist.ProcessGroup | None, case: Case) -> list[list[Record]]:
    """In a worker, so that somebody can end it: a case on local ranks."""
    return tl.local.run(run_rank, case.plan.ranks, None, case, strict=case.strict)


class _Rank:
    """The objects of one rank, used from call to call."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None, case: Case) -> None:
        torch.manual_seed(7)
        modules = case.scenario.make(case.plan.stages)
        self.case = case
        self.mine = case.plan.placement.stages_of(rank)
        self.wired = {s: Wired(modules[s], s, order_of_forwards(case.plan, s)) for s in self.mine}
        self.stages = [self._stage(s, group) for s in self.mine]
        self.last = self.wired.get(case.plan.stages - 1)
        self.schedule = self._schedule()

    def run(self) -> list[Record]:
        return [self._call(number, call) for number, call in enumerate(self.case.calls)]

    def _stage(self, index: int, group: dist.ProcessGroup | None) -> tl.PipelineStage:
        stage = tl.PipelineStage(self.wired[index], index, self.case.plan.stages, CPU, group=group)
        faults = (fault for call in self.case.calls for fault in call.faults)
        if all(fault.where != "weight" for fault in faults):
            return stage  # as it is: a stage with a W of its own is never run as one backward
        weights, trip = stage.backward_weight, self.wired[index].trip

        def backward_weight(microbatch: int) -> None:
            trip("weight", microbatch)
            weights(microbatch)

        stage.backward_weight = backward_weight
        return stage

    def _schedule(self) -> Any:
        case = self.case
        if case.schedule is None:
            return tl.ScheduleFromPlan(self.stages, case.plan, self._loss, **case.options)
        single = case.schedule in ("ScheduleGPipe", "Schedule1F1B")
        make = getattr(tl, case.schedule)
        stages = self.stages[0] if single else self.stages
        return make(stages, case.plan.microbatches, self._loss, **case.options)

    def _loss(self, output: Any, target: Tensor, **kwargs: Any) -> Tensor:
        assert self.last is not None
        self.last.passes("loss")
        return self.case.scenario.loss(output, target, **kwargs)

    def _call(self, number: int, call: Call) -> Record:
        if call.what == "zero":
            for wired in self.wired.values():
                wired.zero_grad()
            return Record()
        record = Record()
        torch.manual_seed(number)
        args, kwargs, target = self.case.scenario.batch(number, call.size)
        for wired in self.wired.values():
            wired.arm(call.faults)
        extra = dict(self.case.scenario.options)
        if call.weights is not None:
            extra["loss_weights"] = call.weights
        try:
            record.output = getattr(self.schedule, call.what)(
                *(args if 0 in self.wired else ()),
                target=None if self.last is None else target,
                losses=record.losses,
                aux_losses=record.aux_losses,
                share_losses=self.case.shares,
                return_outputs=self.case.outputs,
                **kwargs,
                **extra,
            )
        except DeadlockError:
            # Ranks in processes would hang here, so it is no answer to anything.
            raise
        except Exception as error:
            record.error = error
        for stage in self.stages:
            assert not stage._in_flight, f"stage {stage.stage_index} keeps micro-batches"
            assert not stage._weights_due, f"stage {stage.stage_index} keeps weights"
        for s, wired in self.wired.items():
            for name, parameter in wired.module.named_parameters():
                if parameter.grad is not None:
                    record.gradients[f"{s}.{name}"] = parameter.grad.clone()
        return record


class _Plain:
    """The whole model without a pipeline; gradients are added up in the plan's order."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(7)
        self.case = case
        self.modules = case.scenario.make(case.plan.stages)
        self.wanted = {
            f"{s}.{name}": parameter
            for s, module in enumerate(self.modules)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.totals: dict[str, Tensor] = {}
        self.steps = 0

    def call(self, number: int, call: Call) -> Record:
        if call.what == "zero":
            self.totals = {}
            return Record()
        if call.faults:
            return Record(gradients=dict(self.totals))
        record, trains, count = Record(), call.what == "step", self.case.plan.microbatches
        torch.manual_seed(number)
        args, kwargs, target = self.case.scenario.batch(number, call.size)
        targets = target.tensor_split(count)
        args_of, kwargs_of = tl.split_args_kwargs_into_chunks(args, kwargs, count)
        normalised = self.case.options["scale_grads"]
        # In torch's schedules each micro-batch counts the same, in others each row.
        shares = [1 / count if normalised else 1.0] * count
        if normalised and self.case.schedule is None:
            shares = [len(part) / len(target) for part in targets]
        counts = shares
        if call.weights is not None:
            counts = scales(call.weights, targets, normalised=normalised)
        found: list[dict[str, Tensor | None]] = []
        outputs: list[Any] = []
        for m in range(count):
            with torch.set_grad_enabled(trains), tl.collect_losses() as added:
                output = self._forward(args_of[m], kwargs_of[m], m)
                extra = self.case.scenario.options.get("loss_kwargs", {})
                loss = self.case.scenario.loss(output, targets[m], **extra)
                if added:
                    total = torch.stack([one.detach().reshape(()) for one in added]).sum()
                    record.aux_losses.append(total)
                roots = [(loss, counts[m])] if counts[m] else []
                roots += [(one, shares[m]) for one in added if one.requires_grad]
                # In here, since checkpointed blocks run again and get what was put.
                found.append(gradients_of(roots, self.wanted) if trains and roots else {})
            outputs.append(pytree.tree_map_only(Tensor, Tensor.detach, output))
            record.losses.append(loss.detach())
        record.output = tl.merge_chunks(outputs, None)
        if trains:
            self.steps += 1
            add_up(self.totals, found, self.case.plan)
        record.gradients = dict(self.totals)
        return record

    def _forward(self, args: Sequence[Any], kwargs: dict[str, Any], m: int) -> Any:
        seed, output = self.case.options["seed"], args
        for s, module in enumerate(self.modules):
            with nullcontext() if seed is None else seeded((seed, self.steps, s, m), CPU):
                output = module(*as_arguments(output), **kwargs)
        return output


def run_plain(case: Case) -> list[Record]:
    """The same calls on the whole model."""
    plain = _Plain(case)
    return [plain.call(number, call) for number, call in enumerate(case.calls)]
