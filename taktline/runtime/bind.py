"""Binds a lowered plan to stages and a transport: resolves each action to a function, once.

If all stages run in one thread, there are quicker programs with the same gradients. ``join``
replaces I and W by one full backward. ``plain_loop`` runs micro-batch by micro-batch, with one
backward of all stages: no rank waits for another there, so the schedule's order gains nothing, and
a step costs as much as a plain accumulation loop::

    rank 0   F0           B0 │ F1           B1 │
    rank 1      F0     B0    │    F1     B1    │ …
    rank 2         F0 B0     │       F1 B1     │
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from taktline.meta import Signature
from taktline.plan import Action, Kind, Plan
from taktline.runtime.ports import (
    DescribedIncoming,
    DescribedOutgoing,
    DescribedPorts,
    Handback,
    Handover,
    Incoming,
    KnownPorts,
    Outgoing,
)
from taktline.runtime.program import Instruction, Program
from taktline.runtime.random_numbers import RankRandom
from taktline.runtime.runnable_plan import merged
from taktline.runtime.stage_actions import OwnLosses, Work, uncast
from taktline.runtime.step_data import Binding, Signatures
from taktline.side_values import Aside, Replay, opened
from taktline.stage import PipelineStage
from taktline.stage.autograd_engine import accumulate
from taktline.stage.grad_sync import GradSync
from taktline.stage.names import parameters_of
from taktline.transport import Channel


def channels_of(plan: Plan) -> list[Channel]:
    """All channels of a plan, in the order in which all ranks open them."""
    rank_of = plan.placement.rank_of
    pairs = {(a, b) for a, b in pairwise(rank_of) if a != b}
    forward = {Channel(a, b, False) for a, b in pairs}
    return sorted(forward | {Channel(b, a, True) for a, b in pairs})


def bind(binding: Binding, known: Signatures | None) -> Bound:
    """The program of this process; without known signatures each message describes itself."""
    ends = _ends(binding, known)
    make_work = partial(Work, binding, known)
    works = {index: make_work(index, **ends.of(index)) for index in binding.stages}
    rank_of, drawing = binding.plan.placement.rank_of, binding.drawing
    rows = merged(binding.plan) if drawing else binding.plan.rows_of(binding.transport.rank)
    instructions = [
        instruction
        for row in range(len(rows))
        if (instruction := _instruction(rows.leaf(row), binding.stages, works, ends, rank_of))
    ]
    joined = join(instructions, binding.stages, works, alone=drawing is not None)
    loop = None
    if drawing and known is not None and binding.trains:
        loop = plain_loop(instructions, binding.stages, make_work, any_order=binding.any_order)
    if isinstance(drawing, RankRandom):
        instructions = list(drawing.between(instructions, rank_of))
        joined = list(drawing.between(joined, rank_of))

    def quickest() -> Sequence[Instruction]:
        # The random numbers of a rank depend on the order in which it computes.
        return joined if loop is None or drawing is None or drawing.draws else loop

    sending = [*ends.activations_out.values(), *ends.gradients_out.values()]
    settles = [port.settle_all for port in sending]
    program = Program(rank_of, instructions, settles, quickest)
    return Bound(program, works, ends, binding, known)


@dataclass(frozen=True, slots=True)
class Bound:
    """A program with its stage actions."""

    program: Program
    works: Mapping[int, Work]
    ends: _Ends | None
    """The ports of the stages."""
    binding: Binding
    known: Signatures | None
    """The signatures that the program was made for; None: it learns them."""

    @property
    def plan(self) -> Plan:
        """The plan that it runs."""
        return self.binding.plan

    def learned(self) -> Signatures:
        """The signatures that a first run has found."""
        if self.ends is None:
            return Signatures()
        ends = self.ends
        return Signatures(self._noted(ends.activations_in), self._noted(ends.activations_out))

    def _noted(self, ports: Mapping[int, object]) -> dict[int, list[Signature]]:
        return {
            stage: [port.learned[m] for m in range(self.plan.microbatches)]
            for stage, port in ports.items()
            if isinstance(port, (DescribedIncoming, DescribedOutgoing))
        }


@dataclass(frozen=True, slots=True)
class _Ends:
    """The ports of this rank's stages, by stage."""

    handed_on: dict[int, Handover]
    handed_back: dict[int, Handback]
    activations_in: dict[int, Incoming | DescribedIncoming]
    activations_out: dict[int, Outgoing | DescribedOutgoing]
    gradients_in: dict[int, Incoming | DescribedIncoming]
    gradients_out: dict[int, Outgoing | DescribedOutgoing]

    def of(self, stage: int) -> dict[str, Any]:
        """The ports of a stage."""
        return {
            "activations_in": self.handed_on.get(stage - 1) or self.activations_in.get(stage),
            "activations_out": self.handed_on.get(stage) or self.activations_out.get(stage),
            "gradients_in": self.handed_back.get(stage) or self.gradients_in.get(stage),
            "gradients_out": self.handed_back.get(stage - 1) or self.gradients_out.get(stage),
        }


def _ends(binding: Binding, known: Signatures | None) -> _Ends:
    stages, transport, train = binding.stages, binding.transport, binding.trains
    make = DescribedPorts(binding) if known is None else KnownPorts(binding, known)
    here, rank_of = transport.rank, binding.plan.placement.rank_of
    # A boundary between two stages of this rank has the number of the first.
    joined = [stage for stage in stages if stage + 1 in stages]
    later = [s for s in stages if s + 1 < len(rank_of) and s not in joined]
    earlier = [s for s in stages if s > 0 and s - 1 not in joined]
    return _Ends(
        {s: Handover() for s in joined},
        {s: Handback() for s in joined if train},
        {s: make.incoming(s, Channel(rank_of[s - 1], here, False)) for s in earlier},
        {s: make.outgoing(s, Channel(here, rank_of[s + 1], False)) for s in later},
        {s: make.incoming(s, Channel(rank_of[s + 1], here, True)) for s in later if train},
        {s: make.outgoing(s, Channel(here, rank_of[s - 1], True)) for s in earlier if train},
    )


def _instruction(
    action: Action,
    stages: Mapping[int, PipelineStage],
    works: Mapping[int, Work],
    ends: _Ends,
    rank_of: Sequence[int],
) -> Instruction | None:
    """The instruction of an action; None if this kind of stage has nothing to do for it."""
    stage, microbatch = action.stage, action.microbatch
    waits = _waits(action, rank_of)
    if microbatch is None:
        sync = stages[stage].grad_sync
        return None if sync is None else _sync_instruction(action, sync)
    if action.kind in (Kind.SEND_F, Kind.SEND_B):
        out = (ends.activations_out if action.kind == Kind.SEND_F else ends.gradients_out)[stage]
        run, fail = partial(out.send, microbatch), partial(out.fail, microbatch)
        return Instruction(action, run, fail, waits)
    if action.kind in (Kind.RECV_F, Kind.RECV_B):
        into = (ends.activations_in if action.kind == Kind.RECV_F else ends.gradients_in)[stage]
        return Instruction(action, partial(into.post, microbatch), partial(into.post, microbatch))
    method, arrivals = {
        Kind.F: (works[stage].forward, ends.activations_in),
        Kind.B: (works[stage].backward, ends.gradients_in),
        Kind.I: (works[stage].backward_input, ends.gradients_in),
        Kind.W: (works[stage].backward_weight, {}),
    }[action.kind]
    arrival = arrivals.get(stage)
    return Instruction(
        action,
        partial(method, microbatch),
        None if arrival is None else partial(arrival.discard, microbatch),
        waits,
    )


def _waits(action: Action, rank_of: Sequence[int]) -> str:
    """What an action may have to wait for, in words."""
    stage, last = action.stage, len(rank_of) - 1
    match action.kind:
        case Kind.F if stage > 0:
            return f"activations from rank {rank_of[stage - 1]} (stage {stage - 1})"
        case Kind.B | Kind.I if stage < last:
            return f"gradients from rank {rank_of[stage + 1]} (stage {stage + 1})"
        case Kind.SEND_F:
            return f"rank {rank_of[stage + 1]} to receive what was sent"
        case Kind.SEND_B:
            return f"rank {rank_of[stage - 1]} to receive what was sent"
        case _:
            return ""


def _sync_instruction(action: Action, sync: GradSync) -> Instruction | None:
    """The instruction of UNSHARD, RESHARD or REDUCE_GRAD on a wrapped stage."""
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
    *,
    alone: bool,
) -> list[Instruction]:
    """The same instructions with one full backward instead of I and W, where nothing is lost.

    That is where W follows its I at once, or if all ranks run here (``alone``) and gradients are
    added up in the same order.
    """
    sharing = _sharing(stages)
    found = dict(enumerate(instructions))
    places = {instruction.action: place for place, instruction in found.items()}
    halves: defaultdict[int, tuple[list[int | None], list[int | None]]]
    halves = defaultdict(lambda: ([], []))
    for action in places:  # the micro-batches of each stage, in the order of inputs and of weights
        if action.kind in (Kind.B, Kind.I):
            halves[action.stage][0].append(action.microbatch)
        if action.kind in (Kind.B, Kind.W):
            halves[action.stage][1].append(action.microbatch)
    for action, place in places.items():
        microbatch = action.microbatch
        if action.kind != Kind.W or microbatch is None or not stages[action.stage].may_join:
            continue
        first = places.get(replace(action, kind=Kind.I))
        inputs, weights = halves[action.stage]
        may_move = alone and inputs == weights and action.stage not in sharing
        if first is not None and (first == place - 1 or may_move):
            whole = partial(works[action.stage].backward, microbatch)
            found[first] = replace(found[first], run=whole)
            del found[place]
    return list(found.values())


def plain_loop(
    instructions: Sequence[Instruction],
    stages: Mapping[int, PipelineStage],
    make_work: Callable[..., Work],
    *,
    any_order: bool = False,
) -> list[Instruction] | None:
    """The same instructions as a plain loop; None if gradients could differ.

    That is so for a weight of two stages: the loop would add its gradients in another order than
    a first step, which a resumed run begins with, or a traced one. ``make_work(stage, joined=…,
    ports…)`` makes the work of a stage. Forwards keep their order, unless ``any_order`` will do.
    """
    order = _order(instructions, any_order)
    if order is None or _sharing(stages) or not all(stage.may_join for stage in stages.values()):
        return None
    actions = {
        (each.action.stage, each.action.microbatch, each.action.kind == Kind.F): each.action
        for each in instructions
        if each.action.kind != Kind.W
    }
    last = len(stages) - 1
    backward = _Backward(last, stages[last].device.type)
    handed_on = [None, *(Handback() for _ in range(last)), None]
    works = [
        make_work(
            stage,
            joined=backward.keep,
            activations_in=handed_on[stage],
            activations_out=handed_on[stage + 1],
        )
        for stage in range(last + 1)
    ]
    loop: list[Instruction] = []
    for m in order:
        for stage, work in enumerate(works):
            loop.append(Instruction(actions[stage, m, True], partial(work.forward, m), None))
        back = [actions[stage, m, False] for stage in range(last + 1)]
        loop.append(
            Instruction(back[-1], backward.run, None, at=lambda back=back: back[backward.stage])
        )
    return loop


def _sharing(stages: Mapping[int, PipelineStage]) -> set[int]:
    """The stages that train a weight in common with another one."""
    users: defaultdict[int, set[int]] = defaultdict(set)
    for index, stage in stages.items():
        for weight in parameters_of(stage.submod):
            if weight.requires_grad:
                users[id(weight)].add(index)
    return set().union(*(found for found in users.values() if len(found) > 1))


def _order(instructions: Sequence[Instruction], any_order: bool) -> list[int] | None:
    """The order in which all stages compute and add up micro-batches; None if they differ.

    With ``any_order``, that in which they add up.
    """
    orders: defaultdict[tuple[int, bool], list[int | None]] = defaultdict(list)
    for each in instructions:
        action = each.action
        if action.microbatch is None:
            return None
        if action.kind != Kind.I and not (any_order and action.kind == Kind.F):
            orders[action.stage, action.kind == Kind.F].append(action.microbatch)
    first, *others = orders.values()
    return [m for m in first if m is not None] if all(each == first for each in others) else None


class _Backward:
    """The backward of a micro-batch through all stages, as one call.

    Autograd runs the last computation first, so it goes from stage to stage. Hooks on the outputs
    of each stage note where it is.
    """

    def __init__(self, last: int, device_type: str) -> None:
        self._last = last
        self._device_type = device_type
        self._at = [last]
        self._marks = [_Mark(self._at, stage) for stage in range(last + 1)]
        self._roots: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._asides: dict[int, Aside] = {}

    @property
    def stage(self) -> int:
        """The stage that is running."""
        return self._at[0]

    def keep(self, stage: int, results: Sequence[Any], own: OwnLosses, aside: Aside | None) -> None:
        """Keep the results of a forward for the backward."""
        mark = self._marks[stage]
        for value in opened(results)[0]:
            _note(mark, value)
        for loss, gradient in zip(*own, strict=True):
            if gradient is not None:
                self._roots.append(loss)
                self._gradients.append(gradient)
        if aside is not None:
            put = [skip.value for skip in aside.skips.values() if skip.stage == stage]
            _note(mark, (put, aside.losses))
            aside.replays = True
            self._asides[stage] = aside

    def run(self) -> None:
        """Add up the gradients of all stages."""
        roots, gradients, asides = self._roots, self._gradients, self._asides
        self._roots, self._gradients, self._asides, self._at[0] = [], [], {}, self._last
        if asides:
            with Replay(lambda: asides.get(self.stage) or Aside(self.stage, {})):
                uncast(self._device_type, accumulate, roots, gradients)
        elif roots:
            uncast(self._device_type, accumulate, roots, gradients)


def _note(mark: _Mark, tree: Any) -> None:
    """Put a mark on the nodes of all tensors in a tree."""
    if isinstance(tree, torch.Tensor):
        if (node := tree.grad_fn) is not None:
            mark(node)
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            _note(mark, part)
    elif isinstance(tree, dict):
        _note(mark, list(tree.values()))


class _Mark:
    """Notes that the backward has come to a stage: a hook for many nodes of its graph."""

    def __init__(self, at: list[int], stage: int) -> None:
        self._at = at
        self._stage = stage
        self._hooks = torch.empty(0)
        self._hooks._backward_hooks = {0: self._come}

    def __call__(self, node: Any) -> None:
        """Hook a node; without the private way, which is quicker, by a hook of its own."""
        share = getattr(node, "_register_hook_dict", None)
        if share is not None:
            share(self._hooks)
        else:
            node.register_prehook(self._come)

    def _come(self, _: object) -> None:
        self._at[0] = self._stage
