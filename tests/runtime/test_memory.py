"""Memory follows what is in flight: no tensor outlives its use, however many micro-batches run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import taktline as tl
from taktline.meta import TensorMeta
from taktline.plan import Costs, Kind, memory_curve, peak_memory
from taktline.transport.wire import Layout
from tests.runtime.scenarios import SCHEDULES, Case

ROWS, WIDTH = 2, 16  # of a micro-batch
MESSAGE = Layout((TensorMeta((ROWS, WIDTH), torch.float32),)).nbytes
"""The size of a message, which no other tensor here has: it tells buffers from the rest."""
LIMITED = [name for name in SCHEDULES if name not in ("ScheduleGPipe", "ScheduleLoopedBFS")]
"""The schedules that limit what is in flight; the others run all forwards first."""
CALLS = 3
"""The first call learns what crosses boundaries, the second binds that, and the third is like all
that follow."""


class Watch:
    """Tensors of one kind on one rank: how many are alive, seen by their data."""

    def __init__(self) -> None:
        self._made: list[StorageWeakRef] = []

    def add(self, tensor: Tensor) -> None:
        self._made.append(StorageWeakRef(tensor.untyped_storage()))

    @property
    def alive(self) -> int:
        return sum(not made.expired() for made in self._made)


class Rank:
    """One rank of a case, and what was alive in the forwards of its latest call."""

    def __init__(self, case: Case, rank: int) -> None:
        self.hidden, self.factors, self.outputs = Watch(), Watch(), Watch()
        self.seen: list[tuple[int, int]] = []
        """How many hidden activations and factors were alive in each forward, its own included."""
        self.outputs_seen: list[int] = []
        """How many of the model's outputs were alive before each forward of the last stage."""
        self.look: Callable[[Tensor], None] = lambda _: None
        """Called in each forward with its hidden activation."""
        mine = case.plan.placement.stages_of(rank)
        has_last = case.stages - 1 in mine
        modules = {s: Layer(self, is_last=s == case.stages - 1) for s in mine}
        cpu = torch.device("cpu")
        stages = [tl.PipelineStage(modules[s], s, case.stages, cpu) for s in mine]
        self._schedule = case.schedule_of(stages)
        size = (case.microbatches * ROWS, WIDTH)
        self._args = (torch.ones(size),) if 0 in mine else ()
        self._target = torch.ones(size) if has_last else None

    def call(self, name: str, *, return_outputs: bool = False) -> None:
        """Run the batch, until all ranks are done with it."""
        self.seen.clear()
        self.outputs_seen.clear()
        getattr(self._schedule, name)(
            *self._args, target=self._target, return_outputs=return_outputs
        )
        wait_for_others()


class Layer(nn.Module):
    """Two linear layers; the rank watches what is between them.

    ::

        x ──▶ up ──▶ hidden ──▶ gelu ──▶ factor ──▶ down ──▶ output

    The gradient of the input needs the hidden activation, that of a weight needs the factor.
    """

    def __init__(self, rank: Rank, *, is_last: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self._rank = rank
        self._is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        rank = self._rank
        if self._is_last:
            rank.outputs_seen.append(rank.outputs.alive)
        hidden = self.up(x)
        factor = nn.functional.gelu(hidden)
        rank.hidden.add(hidden)
        rank.factors.add(factor)
        rank.seen.append((rank.hidden.alive, rank.factors.alive))
        rank.look(hidden)
        output = self.down(factor)
        if self._is_last:
            rank.outputs.add(output)
        return output


def wait_for_others() -> None:
    transport = tl.local.current()
    assert transport is not None
    transport.exchange([0])


def in_flight(case: Case, rank: int) -> list[tuple[int, int]]:
    """What the plan says is alive in each forward of a rank, for ``seen``.

    B needs everything. Where it is split, what the gradients of the inputs need lives until I, and
    only what the gradients of the weights need lives on until W.
    """
    until_input, until_weight = (
        alive(case, rank, Costs(activation=1.0, kept_for_weight=kept)) for kept in (0.0, 1.0)
    )
    assert (
        max(until_weight) == peak_memory(case.plan, Costs(activation=1.0))[rank]
    )  # all is kept for W
    return list(zip(until_input, until_weight, strict=True))


def outputs_in_flight(case: Case, rank: int) -> list[int]:
    """What the plan says of outputs before each forward of the last stage, for ``outputs_seen``.

    The backward of the loss needs them, so they live until I.
    """
    last = case.stages - 1
    only_last = tuple(float(stage == last) for stage in range(case.stages))
    counts = alive(case, rank, Costs(activation=only_last, kept_for_weight=0.0), stage=last)
    return [count - 1 for count in counts]  # that forward has yet to make its own


def alive(case: Case, rank: int, costs: Costs, *, stage: int | None = None) -> list[int]:
    """The memory curve of a rank in its forwards, or in those of one of its stages."""
    plan = case.plan
    during = memory_curve(plan, costs)[0][plan.offsets[rank] : plan.offsets[rank + 1]]
    rows = plan.rows_of(rank)
    forward = rows.kind == Kind.F
    chosen = forward if stage is None else forward & (rows.stage == stage)
    return during[chosen].astype(int).tolist()


def cases() -> Iterator[Case]:
    for schedule, per_rank_choices in SCHEDULES.items():
        for ranks in (2, 4):
            for per_rank in per_rank_choices:
                for microbatches in (3, 8):
                    yield Case(schedule, ranks, per_rank, microbatches)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_activations_live_as_long_as_the_plan_says(case: Case) -> None:
    def main(rank: int) -> None:
        watched = Rank(case, rank)
        for _ in range(CALLS):
            watched.call("step")
            assert watched.seen == in_flight(case, rank)
            assert watched.hidden.alive == watched.factors.alive == 0

    tl.local.run(main, case.ranks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_keeps_no_activations(schedule: str) -> None:
    case = Case(schedule, 2, SCHEDULES[schedule][-1], 8)

    def main(rank: int) -> None:
        watched = Rank(case, rank)
        for _ in range(CALLS):
            watched.call("eval")
            assert watched.seen == [(1, 1)] * (case.per_rank * case.microbatches)
            assert watched.hidden.alive == watched.factors.alive == 0

    tl.local.run(main, case.ranks)


def fail(_: object) -> None:
    raise ValueError("as the test wants it")


def fail_in_backward(hidden: Tensor) -> None:
    hidden.register_hook(fail)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("when", [fail, fail_in_backward], ids=["forward", "backward"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_that_fails_keeps_nothing(schedule: str, when: Callable[[Tensor], None]) -> None:
    case = Case(schedule, 2, SCHEDULES[schedule][-1], 6)

    def main(rank: int) -> None:
        watched = Rank(case, rank)

        def look(hidden: Tensor) -> None:
            if rank == 1 and len(watched.seen) == 4:
                when(hidden)

        for known in (False, True):
            watched.look = look
            with pytest.raises(tl.StageError, match="as the test wants it"):
                watched.call("step")
            assert watched.seen  # so there was something to keep
            wait_for_others()
            # The error and the frames in its traceback, such as the layer's, hold each other.
            gc.collect()
            assert watched.hidden.alive == watched.factors.alive == 0, known
            watched.look = lambda _: None
            for _ in range(CALLS):  # also to learn again what a failure makes it forget
                watched.call("step")
                assert watched.seen == in_flight(case, rank)

    tl.local.run(main, case.ranks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_outputs_are_kept_only_if_asked_for(schedule: str) -> None:
    case = Case(schedule, 2, SCHEDULES[schedule][-1], 8)

    def main(rank: int) -> None:
        watched = Rank(case, rank)
        in_flight = outputs_in_flight(case, rank)
        for call, others in ("step", in_flight), ("eval", [0] * len(in_flight)):
            for _ in range(CALLS):
                watched.call(call, return_outputs=False)
                assert watched.outputs_seen == others
                watched.call(call, return_outputs=True)
                assert watched.outputs_seen == list(range(len(in_flight)))  # all of them
                assert watched.outputs.alive == 0

    tl.local.run(main, case.ranks)


class Live(NamedTuple):
    """All tensors of all ranks: how many message buffers, and bytes beside the batch's."""

    messages: int
    bytes: int

    @classmethod
    def now(cls, case: Case) -> Live:
        # Not isinstance(): it is slower, and warns on proxies of modules.
        tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}.values()
        batch = 2 * case.microbatches * ROWS * WIDTH * torch.float32.itemsize  # and its target
        return cls(sum(size == MESSAGE for size in sizes), sum(sizes) - batch)


def measure(case: Case, call: str, *, calls: int = CALLS) -> tuple[Live, Live]:
    """What is alive on two local ranks at most during the last of some calls, and after it."""
    seen: list[Live] = []

    def main(rank: int) -> Live:
        watched = Rank(case, rank)
        for _ in range(calls - 1):
            watched.call(call)
        watched.look = lambda _: seen.append(Live.now(case))
        wait_for_others()  # both have their batch now
        watched.call(call)
        return Live.now(case)

    gc.collect()
    gc.freeze()  # hides all that is there already: it is not ours, and looking at it takes long
    after, _ = tl.local.run(main, case.ranks)
    peak = Live(max(live.messages for live in seen), max(live.bytes for live in seen))
    return peak, after


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", ["step", "eval"])
@pytest.mark.parametrize("schedule", LIMITED)
def test_memory_does_not_grow_with_the_number_of_microbatches(schedule: str, call: str) -> None:
    few, many = 8, 32
    per_rank = 1 if schedule == "Schedule1F1B" else 2
    peak, after = measure(Case(schedule, 2, per_rank, few), call)
    many_peak, many_after = measure(Case(schedule, 2, per_rank, many), call)
    assert many_after == after
    assert many_peak.messages == peak.messages > 0
    losses = many * torch.float32.itemsize
    assert many_peak.bytes - peak.bytes <= losses


def test_memory_does_not_grow_in_the_first_step_either() -> None:
    few, _ = measure(Case("Schedule1F1B", 2, 1, 8), "step", calls=1)
    many, _ = measure(Case("Schedule1F1B", 2, 1, 64), "step", calls=1)
    assert few.messages == many.messages
