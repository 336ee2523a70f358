"""The program of a process: the actions of a plan, each resolved once to a function.

If all stages run in one thread, there is a quicker program with the same gradients, the
``plain_loop``: micro-batch by micro-batch, with one backward of all stages. No rank waits for
another there, so the schedule's order gains nothing, and a step costs as much as a plain
accumulation loop::

    rank 0   F0           B0 │ F1           B1 │
    rank 1      F0     B0    │    F1     B1    │ …
    rank 2         F0 B0     │       F1 B1     │
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from taktline import pytree
from taktline.errors import StageError, TaktlineError, text_of
from taktline.meta import Signature
from taktline.plan import Action, Kind, Plan
from taktline.runtime.ports import Incoming, Outgoing, PeerFailed, ports_of
from taktline.runtime.runnable_plan import merged
from taktline.runtime.saving import SavingWork, saving_works
from taktline.runtime.stage_actions import (
    Binding,
    Handover,
    Ports,
    Signatures,
    Work,
    uncast,
)
from taktline.side_values import Replay, SideValues, without_skips
from taktline.stage import PipelineStage
from taktline.stage.grad_sync import GradSync
from taktline.stage.split_backward import accumulate
from taktline.stage.stage import parameters_of
from taktline.transport import Channel


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action, resolved to a function."""

    action: Action
    run: Callable[[], None]
    forgo: Callable[[], None] | None
    """Replaces ``run`` once this rank has failed: the part that other ranks need."""
    waits: str = ""
    """What the action may have to wait for, in words."""
    at: Callable[[], Action] | None = None
    """Where one instruction does several actions: returns the one that is running."""

    @property
    def running(self) -> Action:
        """The action that is running."""
        return self.action if self.at is None else self.at()


@dataclass(frozen=True, slots=True)
class Failure:
    """A step that failed on this rank; without an error, another rank has the error."""

    error: TaktlineError | None = None


class Program:
    """All actions of one rank in a step, in order; or of all ranks of one process.

    After a failure it runs only what other ranks need: its messages.
    """

    def __init__(
        self,
        binding: Binding,
        instructions: Sequence[Instruction],
        settles: Iterable[Callable[[], None]] = (),
        *,
        quickest: Sequence[Instruction] | None = None,
        works: Mapping[int, Work] = MappingProxyType({}),
        known: Signatures | None = None,
    ) -> None:
        """The ``settles`` wait for all sends.

        ``quickest`` are fewer, equal instructions, for steps whose actions nobody observes. The
        ``works`` have the signatures ``known``; None: they learn them.
        """
        self.binding, self.works, self.known = binding, works, known
        self._each = self._instructions = instructions
        self.quickest = instructions if quickest is None else quickest
        self._settles = list(settles)
        self.position = 0
        """The instruction that is running."""

    @property
    def current(self) -> Instruction | None:
        """The instruction that is running; None after the last."""
        left = self._instructions[self.position :]
        return left[0] if left else None

    def step(self) -> AbstractContextManager[None]:
        """A block for the run and what follows it."""
        return nullcontext()

    def run(self, observe: Callable[[Instruction], None] | None = None) -> Failure | None:
        """Run all instructions, or let each be run by ``observe``; returns None if all worked.

        After a failure, :meth:`forgo` must follow. Raises if the other ranks have left the step.
        """
        if observe is None:
            self._instructions = self.quickest
            runs = [each.run for each in self._instructions]
        else:
            self._instructions = self._each
            runs = [partial(observe, each) for each in self._instructions]
        try:
            for self.position, run in enumerate(runs):
                run()
            self.position = len(runs)
        except PeerFailed:
            return Failure()
        except Exception as error:
            if isinstance(error, TaktlineError) and error.recoverable != "step":
                raise
            return Failure(self._located(error))
        return None

    def run_alone(self, before: Callable[[Action], None], after: Callable[[], None]) -> None:
        """Run all instructions and wait for all sends; raises the first error with its place.

        For a capture, in which no message reaches another rank. ``before`` and ``after`` are called
        around each instruction.
        """
        self._instructions = running = self.quickest
        try:
            for self.position, instruction in enumerate(running):
                before(instruction.action)
                instruction.run()
                after()
        except Exception as error:
            raise self._located(error) from error
        self.settle()

    def forgo(self) -> Iterator[Exception]:
        """Compute nothing from now on, but take part in every message, so no other rank hangs.

        Yields the errors of messages.
        """
        for instruction in self._instructions[self.position :]:
            try:
                if instruction.forgo is not None:
                    instruction.forgo()
            except Exception as error:
                if isinstance(error, TaktlineError) and error.recoverable != "step":
                    raise
                yield error

    def settle(self) -> None:
        """Wait for all sends and free their buffers; only after every rank has ended the step.

        Not earlier: gloo may lose track of a message whose connection ends, and wait for ever.
        """
        for settle in self._settles:
            settle()

    def learned(self) -> Signatures:
        """The signatures that a first run has found."""
        arriving, leaving = dict[int, list[Signature]](), dict[int, list[Signature]]()
        for stage, work in self.works.items():
            ports = work.ports
            sides = (arriving, ports.activations_in), (leaving, ports.activations_out)
            for table, port in sides:
                if isinstance(port, Incoming | Outgoing):
                    count = self.binding.plan.microbatches
                    table[stage] = [port.learned[m] for m in range(count)]
        return Signatures(arriving, leaving)

    def _located(self, error: Exception) -> StageError:
        """An error of the running instruction, with its place."""
        running = self._instructions[min(self.position, len(self._instructions) - 1)].running
        rank = self.binding.plan.placement.rank_of[running.stage]
        return stage_error(error, rank, running.stage, running.microbatch, str(running))


def stage_error(
    error: Exception, rank: int, stage: int, microbatch: int | None, action: str
) -> StageError:
    """An error with the rank, stage and action where it was raised."""
    reason = f"{type(error).__name__}: {text_of(error)}"
    if "modified by an inplace operation" in reason:
        reason += (
            "\nSeveral micro-batches are under way at once: a forward must not change in place "
            "what the backward of another one needs; change weights after step()"
        )
    located = StageError(
        rank=rank, stage=stage, microbatch=microbatch, action=action, reason=reason
    )
    located.__cause__ = error
    return located


def channels_of(plan: Plan) -> list[Channel]:
    """All channels of a plan, in the order in which all ranks open them."""
    rank_of = plan.placement.rank_of
    pairs = {(a, b) for a, b in pairwise(rank_of) if a != b}
    forward = {Channel(a, b, False) for a, b in pairs}
    return sorted(forward | {Channel(b, a, True) for a, b in pairs})


def bind(binding: Binding, known: Signatures | None) -> Program:
    """The program of this process; without known signatures each message describes itself."""
    rank_of, alone = binding.plan.placement.rank_of, binding.alone
    ports = ports_of(binding, known)
    saves = binding.plan.saves_memory
    works: Mapping[int, Work]
    if saves:
        works = saving_works(binding, known, ports)
    else:
        works = {index: Work(binding, known, index, ports[index]) for index in binding.stages}
    rows = merged(binding.plan) if alone else binding.plan.rows_of(binding.transport.rank)
    each = [
        instruction
        for row in range(len(rows))
        if (instruction := _instruction(rows.leaf(row), binding.stages, works, ports, rank_of))
    ]
    loop = None
    if alone and known is not None and binding.trains and not (binding.draws or saves):
        loop = plain_loop(each, binding, known)
    quickest = loop or join(each, binding.stages, works)

    sends = [out for port in ports.values() for out in (port.activations_out, port.gradients_out)]
    settles = [out.sends.settle_all for out in sends if isinstance(out, Outgoing)]
    return Program(binding, each, settles, quickest=quickest, works=works, known=known)


def _instruction(
    action: Action,
    stages: Mapping[int, PipelineStage],
    works: Mapping[int, Work],
    ports: Mapping[int, Ports],
    rank_of: Sequence[int],
) -> Instruction | None:
    """The instruction of an action; None if this kind of stage has nothing to do for it."""
    stage, m, work, port = action.stage, action.microbatch, works[action.stage], ports[action.stage]
    if m is None:
        return _of_weights(action, stages[stage])
    before, after = (
        f"rank {rank_of[s]}" if 0 <= s < len(rank_of) else "" for s in (stage - 1, stage + 1)
    )
    match action.kind:
        case Kind.F:
            arrives, run = port.activations_in, work.forward
            waits = before and f"activations from {before} (stage {stage - 1})"
        case Kind.B | Kind.I:
            arrives = port.gradients_in
            run = work.backward if action.kind == Kind.B else work.backward_input
            waits = after and f"gradients from {after} (stage {stage + 1})"
        case Kind.W:
            return Instruction(action, partial(work.backward_weight, m), None)
        case Kind.OFFLOAD | Kind.RELOAD | Kind.RECOMPUTE:
            assert isinstance(work, SavingWork)
            return Instruction(action, partial(work.run, action.kind, m), None)
        case Kind.RECV_F | Kind.RECV_B:
            arrives = port.activations_in if action.kind == Kind.RECV_F else port.gradients_in
            return Instruction(action, partial(arrives.post, m), partial(arrives.post, m))
        case _:
            forward = action.kind == Kind.SEND_F
            out = port.activations_out if forward else port.gradients_out
            waits = f"{after if forward else before} to receive what was sent"
            return Instruction(action, partial(out.send, m), partial(out.fail, m), waits)
    return Instruction(action, partial(run, m), arrives and partial(arrives.discard, m), waits)


def _of_weights(action: Action, stage: PipelineStage) -> Instruction | None:
    """The instruction of UNSHARD, RESHARD or REDUCE_GRAD; None where a stage needs none."""
    sync, streamed = stage.grad_sync, stage.streamed
    if streamed is not None and action.kind == Kind.UNSHARD:
        return Instruction(action, streamed.fetch, None)
    if streamed is not None and action.kind == Kind.RESHARD:
        return Instruction(action, streamed.release, streamed.release)
    return None if sync is None else _sync_instruction(action, sync)


def _sync_instruction(action: Action, sync: GradSync) -> Instruction | None:
    """The same of a wrapped stage."""
    waits = "the replicas of this rank"
    if action.kind == Kind.REDUCE_GRAD:
        return Instruction(action, sync.reduce, sync.forgo_reduce, waits)
    if not sync.shards:
        return None
    if action.kind == Kind.UNSHARD:
        return Instruction(action, sync.unshard, sync.forgo_unshard, waits)
    return Instruction(action, sync.reshard, sync.forgo_reshard)


def join(
    instructions: Sequence[Instruction],
    stages: Mapping[int, PipelineStage],
    works: Mapping[int, Work],
) -> list[Instruction]:
    """The same instructions with one full backward wherever W follows its I at once."""
    found: list[Instruction] = []
    for each in instructions:
        stage, m, kind = each.action.stage, each.action.microbatch, each.action.kind
        if (
            kind == Kind.W
            and m is not None
            and stages[stage].may_join
            and found
            and found[-1].action == Action(stage, Kind.I, m)
        ):
            found[-1] = replace(found[-1], run=partial(works[stage].backward, m))
        else:
            found.append(each)
    return found


def plain_loop(
    instructions: Sequence[Instruction], binding: Binding, known: Signatures
) -> list[Instruction] | None:
    """The same instructions as a plain loop; None if gradients could differ.

    That is so for a weight of two stages: the loop would add its gradients in another order than
    a first step, which a resumed run begins with, or a traced one.
    """
    stages, order = binding.stages, _order(instructions, binding.any_order)
    if order is None or _share(stages) or not all(stage.may_join for stage in stages.values()):
        return None
    last = len(stages) - 1
    backward = _Backward(last, stages[last].device)
    works = list[Work]()
    for stage in range(last + 1):
        into = works[-1].ports.activations_out if works else None
        out = Handover(detached=False) if stage < last else None
        works.append(Work(binding, known, stage, Ports(into, out)))
        works[-1].flattens = False
    loop: list[Instruction] = []
    for m in order:
        for stage, work in enumerate(works):
            run = partial(backward.forward, stage, work, m)
            loop.append(Instruction(Action(stage, Kind.F, m), run, None))
        back = [Action(stage, Kind.B, m) for stage in range(last + 1)]
        loop.append(
            Instruction(back[-1], backward.run, None, at=lambda back=back: back[backward.stage])
        )
    return loop


def _share(stages: Mapping[int, PipelineStage]) -> bool:
    """Whether two stages train the same weight."""
    trained = [{id(p) for p in parameters_of(s.submod) if p.requires_grad} for s in stages.values()]
    return sum(map(len, trained)) > len(set[int]().union(*trained))


def _order(instructions: Sequence[Instruction], any_order: bool) -> list[int] | None:
    """The order in which all stages compute and add up micro-batches; None if they differ.

    With ``any_order``, that in which they add up.
    """
    orders: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for each in instructions:
        action = each.action
        if action.microbatch is None:
            return None
        if action.kind != Kind.I and not (any_order and action.kind == Kind.F):
            orders[action.stage, action.kind == Kind.F].append(action.microbatch)
    first, *others = orders.values()
    return first if all(each == first for each in others) else None


class _Backward:
    """The backward of a micro-batch through all stages, as one call.

    Autograd runs the last computation first, so it goes from stage to stage. Hooks on the outputs
    of each stage note where it is.
    """

    def __init__(self, last: int, device: torch.device) -> None:
        self._last = self.stage = last
        """``stage`` is the one that is running."""
        self._device = device
        self._roots: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._side_values: dict[int, SideValues] = {}
        self._hooks = [torch.empty(0) for _ in range(last + 1)]
        """Each carries one hook for many nodes of a stage."""
        for stage, hooks in enumerate(self._hooks):
            hooks._backward_hooks = {0: partial(self._come, stage)}

    def forward(self, stage: int, work: Work, microbatch: int) -> None:
        """Run the forward of a stage, and keep its results for the backward."""
        _, results, own, side = work.compute(microbatch)
        self._mark(stage, without_skips(results)[0])
        for loss, gradient in zip(*own, strict=True):
            if gradient is not None:
                self._roots.append(loss)
                self._gradients.append(gradient)
        if side is not None:
            self._mark(stage, [skip.value for skip in side.skips.values() if skip.stage == stage])
            self._mark(stage, side.losses)
            side.replays = True
            self._side_values[stage] = side

    def run(self) -> None:
        """Add up the gradients of all stages."""
        roots, gradients, side_values = self._roots, self._gradients, self._side_values
        self._roots, self._gradients, self._side_values, self.stage = [], [], {}, self._last
        if side_values:
            with Replay(lambda: side_values.get(self.stage) or SideValues(self.stage, {})):
                uncast(self._device, accumulate, roots, gradients)
        elif roots:
            uncast(self._device, accumulate, roots, gradients)

    def _mark(self, stage: int, values: Sequence[Any]) -> None:
        """Hook the nodes of all tensors among some values."""
        for value in values:
            for tensor in [value] if type(value) is torch.Tensor else pytree.tree_leaves(value):
                node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
                if node is None:
                    continue
                if hasattr(node, "_register_hook_dict"):
                    node._register_hook_dict(self._hooks[stage])
                else:  # slower, without the private way
                    node.register_prehook(partial(self._come, stage))

    def _come(self, stage: int, _: object) -> None:
        self.stage = stage
