"""Binds a lowered plan to stages and a transport: resolves each action to a function, once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from taktline import pytree
from taktline.meta import Signature, TensorMeta, flatten
from taktline.plan import Action, Kind, Plan
from taktline.runtime.fused_backward import join, plain_loop
from taktline.runtime.ports import Handback, Handover, Incoming, Outgoing
from taktline.runtime.program import Instruction, Program
from taktline.runtime.random_numbers import Drawing, RankRandom, Seeded, seeded
from taktline.runtime.runnable_plan import merged
from taktline.runtime.self_describing import Inbox, LearningIncoming, LearningOutgoing, Line, Outbox
from taktline.runtime.stage_actions import Work
from taktline.runtime.step_data import Feed
from taktline.side_values import handed_on, opened
from taktline.stage import PipelineStage
from taktline.stage.grad_sync import GradSync
from taktline.transport import Channel, Transport
from taktline.transport.wire import Layout

__all__ = ["Binding", "Bound", "Signatures", "bind", "channels_of"]

UNDER_WAY = 2
"""How many messages of a boundary may be under way where no reply tells that they arrived."""


@dataclass(slots=True)
class Signatures:
    """The values that cross this rank's boundaries: for each stage, a signature per micro-batch."""

    arriving: dict[int, list[Signature]] = field(default_factory=dict)
    leaving: dict[int, list[Signature]] = field(default_factory=dict)
    routes: Mapping[str, int] = field(default_factory=dict)
    """The last stage that gets each skip."""

    def along(self, routes: Mapping[str, int]) -> Signatures:
        """The same signatures with skips that end at their route, and not at the last stage."""
        return Signatures(
            {s: [_without(x, routes, s - 1) for x in table] for s, table in self.arriving.items()},
            {s: [_without(x, routes, s) for x in table] for s, table in self.leaving.items()},
            routes,
        )


def _without(signature: Signature, routes: Mapping[str, int], stage: int) -> Signature:
    """The signature of a stage's output, without skips that no later stage gets."""
    if signature.spec is None:
        return signature
    arguments, skips = opened(pytree.tree_unflatten(signature.leaves, signature.spec))
    leaves, spec = flatten(handed_on(arguments, skips, routes, stage))
    return Signature(tuple(leaves), spec)


@dataclass(frozen=True, slots=True)
class Binding:
    """All that a program is made from."""

    plan: Plan
    stages: Mapping[int, PipelineStage]
    transport: Transport
    feed: Feed
    loss_fn: Callable[..., torch.Tensor] | None = None
    seed: int | None = None
    trains: bool = True
    sends_may_wait: bool = True
    """Whether the plan cannot deadlock where a send waits until its receive is posted."""
    drawing: Drawing | None = None
    """Where all stages run in one thread: observes random numbers, and separates those of ranks."""
    seeded: Seeded = seeded
    """Sets the seed for a stage and micro-batch."""


def channels_of(plan: Plan) -> list[Channel]:
    """All channels of a plan, in the order in which all ranks open them."""
    rank_of = plan.placement.rank_of
    pairs = {(a, b) for a, b in pairwise(rank_of) if a != b}
    forward = {Channel(a, b, False) for a, b in pairs}
    return sorted(forward | {Channel(b, a, True) for a, b in pairs})


def bind(binding: Binding, known: Signatures | None) -> Bound:
    """The program of this process; without known signatures each message describes itself."""
    make = _Learning(binding) if known is None else _Known(binding, known)
    ends = _ends(binding, make)
    make_work = partial(_work, binding, known)
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
        loop = plain_loop(instructions, binding.stages, make_work)
    if isinstance(drawing, RankRandom):
        instructions = list(drawing.between(instructions, rank_of))
        joined = list(drawing.between(joined, rank_of))

    def quickest() -> Sequence[Instruction]:
        # The random numbers of a rank depend on the order in which it computes.
        return joined if loop is None or drawing is None or drawing.draws else loop

    sending = [*ends.activations_out.values(), *ends.gradients_out.values()]
    program = Program(rank_of, instructions, sending, quickest)
    learned = partial(_learned, ends, binding.plan.microbatches)
    return Bound(program, works, learned, binding, known)


@dataclass(frozen=True, slots=True)
class Bound:
    """A program with its stage actions."""

    program: Program
    works: Mapping[int, Work]
    learned: Callable[[], Signatures]
    """Returns the signatures after the first run."""
    binding: Binding
    known: Signatures | None
    """The signatures that the program was made for; None: it learns them."""

    @property
    def plan(self) -> Plan:
        """The plan that it runs."""
        return self.binding.plan


@dataclass(frozen=True, slots=True)
class _Ends:
    """The ports of this rank's stages, by stage."""

    handed_on: dict[int, Handover]
    handed_back: dict[int, Handback]
    activations_in: dict[int, Incoming | LearningIncoming]
    activations_out: dict[int, Outgoing | LearningOutgoing]
    gradients_in: dict[int, Incoming | LearningIncoming]
    gradients_out: dict[int, Outgoing | LearningOutgoing]

    def of(self, stage: int) -> dict[str, Any]:
        """The ports of a stage."""
        return {
            "activations_in": self.handed_on.get(stage - 1) or self.activations_in.get(stage),
            "activations_out": self.handed_on.get(stage) or self.activations_out.get(stage),
            "gradients_in": self.handed_back.get(stage) or self.gradients_in.get(stage),
            "gradients_out": self.handed_back.get(stage - 1) or self.gradients_out.get(stage),
        }


def _ends(binding: Binding, make: _Known | _Learning) -> _Ends:
    here, rank_of = binding.transport.rank, binding.plan.placement.rank_of
    # A boundary between two stages of this rank has the number of the first.
    joined = [stage for stage in binding.stages if stage + 1 in binding.stages]
    later = [s for s in binding.stages if s + 1 < len(rank_of) and s not in joined]
    earlier = [s for s in binding.stages if s > 0 and s - 1 not in joined]
    train = binding.trains
    return _Ends(
        {s: Handover() for s in joined},
        {s: Handback() for s in joined if train},
        {s: make.incoming(s, Channel(rank_of[s - 1], here, False)) for s in earlier},
        {s: make.outgoing(s, Channel(here, rank_of[s + 1], False)) for s in later},
        {s: make.incoming(s, Channel(rank_of[s + 1], here, True)) for s in later if train},
        {s: make.outgoing(s, Channel(here, rank_of[s - 1], True)) for s in earlier if train},
    )


class _Known:
    """Makes ports whose messages have known sizes."""

    def __init__(self, binding: Binding, signatures: Signatures) -> None:
        self._binding = binding
        self._signatures = signatures
        self._layouts: dict[object, Layout] = {}

    def incoming(self, stage: int, channel: Channel) -> Incoming:
        """The receiving end for a stage."""
        signatures = (
            [Signature(s.gradients) for s in self._signatures.leaving[stage]]
            if channel.gradients
            else self._signatures.arriving[stage]
        )
        layouts = [self._layout(stage, s.tensors) for s in signatures]
        return Incoming(self._binding.transport.receiver(channel), layouts, signatures)

    def outgoing(self, stage: int, channel: Channel) -> Outgoing:
        """The sending end for a stage."""
        post = self._binding.transport.sender(channel)
        # In training, the gradient of a micro-batch shows that its activations have arrived.
        answered = self._binding.trains and not channel.gradients
        limit = None if answered or not self._binding.sends_may_wait else UNDER_WAY
        if channel.gradients:
            arriving = self._signatures.arriving[stage]
            return Outgoing(post, [self._layout(stage, s.gradients) for s in arriving], limit=limit)
        leaving = self._signatures.leaving[stage]
        layouts = [self._layout(stage, s.tensors) for s in leaving]
        return Outgoing(post, layouts, leaving, limit=limit)

    def _layout(self, stage: int, tensors: tuple[TensorMeta, ...]) -> Layout:
        owner = self._binding.stages[stage]
        # Stages share layouts and buffers, unless they may lie on different meshes.
        sharded = any(tensor.sharding for tensor in tensors)
        key = (tensors, owner.device, stage if sharded else None)
        if key not in self._layouts:
            self._layouts[key] = Layout(tensors, owner.device, owner.mesh_for)
        return self._layouts[key]


class _Learning:
    """Makes ports whose messages describe themselves."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._lines: defaultdict[int, Line] = defaultdict(Line)

    def incoming(self, stage: int, channel: Channel) -> LearningIncoming:
        """The receiving end for a stage."""
        line = self._lines[channel.sender]
        if channel.gradients not in line.inboxes:
            line.inboxes[channel.gradients] = Inbox(
                self._binding.transport.receiver(channel),
                self._order(channel),
                self._binding.stages[stage].device,
                line,
            )
        return LearningIncoming(line.inboxes[channel.gradients], self._binding.stages[stage])

    def outgoing(self, stage: int, channel: Channel) -> LearningOutgoing:
        """The sending end for a stage."""
        line = self._lines[channel.receiver]
        if channel.gradients not in line.outboxes:
            post = self._binding.transport.sender(channel, eager=True)
            line.outboxes[channel.gradients] = Outbox(post, self._binding.stages[stage].device)
        return LearningOutgoing(line.outboxes[channel.gradients], line)

    def _order(self, channel: Channel) -> list[tuple[int, int]]:
        """The (stage, micro-batch) of each message, in the order of the plan's receives."""
        plan, rank_of = self._binding.plan, self._binding.plan.placement.rank_of
        kind, step = (Kind.RECV_B, 1) if channel.gradients else (Kind.RECV_F, -1)
        rows = plan.rows_of(channel.receiver)
        return [
            (stage, microbatch)
            for row, stage, microbatch in zip(
                rows.kind.tolist(), rows.stage.tolist(), rows.microbatch.tolist(), strict=True
            )
            if row == kind and rank_of[stage + step] == channel.sender
        ]


def _learned(ends: _Ends, microbatches: int) -> Signatures:
    def table(ports: Mapping[int, object]) -> dict[int, list[Signature]]:
        return {
            stage: [port.learned[m] for m in range(microbatches)]
            for stage, port in ports.items()
            if isinstance(port, (LearningIncoming, LearningOutgoing))
        }

    return Signatures(table(ends.activations_in), table(ends.activations_out))


def _work(binding: Binding, known: Signatures | None, stage: int, **ports: Any) -> Work:
    return Work(
        binding.stages[stage],
        binding.feed,
        binding.plan.microbatches,
        loss_fn=binding.loss_fn,
        seed=binding.seed,
        seeded=binding.seeded,
        trains=binding.trains,
        checks=known is None,
        routes=None if known is None else known.routes,
        **ports,
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
