"""Binds a lowered plan to stages and a transport: resolves each action to a function, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from taktline.meta import Signature
from taktline.plan import Action, Kind, Plan
from taktline.runtime.fused_backward import join, plain_loop
from taktline.runtime.ports import Handback, Handover, Incoming, KnownPorts, Outgoing, Signatures
from taktline.runtime.program import Instruction, Program
from taktline.runtime.random_numbers import RankRandom
from taktline.runtime.runnable_plan import merged
from taktline.runtime.self_describing import DescribedIncoming, DescribedOutgoing, DescribedPorts
from taktline.runtime.stage_actions import Binding, Work
from taktline.stage import PipelineStage
from taktline.stage.grad_sync import GradSync
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
    if known is None:
        make = DescribedPorts(stages, transport, binding.plan)
    else:
        make = KnownPorts(
            stages,
            transport,
            known,
            trains=train,
            sends_may_wait=binding.sends_may_wait,
            most_sends=binding.most_sends,
        )
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


def _learned(ends: _Ends, microbatches: int) -> Signatures:
    def table(ports: Mapping[int, object]) -> dict[int, list[Signature]]:
        return {
            stage: [port.learned[m] for m in range(microbatches)]
            for stage, port in ports.items()
            if isinstance(port, (DescribedIncoming, DescribedOutgoing))
        }

    return Signatures(table(ends.activations_in), table(ends.activations_out))


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
