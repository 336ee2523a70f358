"""All ranks of a plan in one thread: their order, what is handed over, and what a user sees.

They run micro-batch by micro-batch, where users can see only what the plan's order shows, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taktline as tl
from taktline.errors import StageError, TransportError
from taktline.plan import Kind, Plan, build, names
from taktline.runtime.runnable_plan import Runnable, merged

X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.zeros(8, 4)
CPU = torch.device("cpu")


def pipeline(*stages: nn.Module, **options: Any) -> tl.Pipeline:
    """A stage on each rank, unless there are other numbers."""
    usual = {"microbatches": 4, "loss_fn": nn.functional.mse_loss, "ranks": len(stages)}
    return tl.Pipeline(list(stages), **(usual | options))


def nothing(*_: object) -> None: ...


def draw(*_: object) -> None:
    torch.rand(())


class Watched(nn.Linear):
    """Calls something with its input and output, whose result, if any, is the output."""

    def __init__(self, seen: Callable[[Tensor, Tensor], Any] = nothing) -> None:
        super().__init__(4, 4)
        self.seen = seen

    def forward(self, input: Tensor) -> Tensor:
        output = torch.tanh(super().forward(input))
        changed = self.seen(input, output)
        return output if changed is None else changed


def in_order(plan: Plan, rows: Any) -> None:
    """Fail unless everything is computed once, after what it needs, each rank in its own order."""
    messages = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    actions = [rows.leaf(row) for row in range(len(rows))]
    at = {action: number for number, action in enumerate(actions)}
    for rank in range(plan.ranks):
        own = plan.rows_of(rank)
        expected = [own.leaf(row) for row in range(len(own))]
        found = [a for a in actions if plan.placement.rank_of[a.stage] == rank]
        assert found == [a for a in expected if a.kind not in messages]
    for action, number in at.items():
        if action.kind == Kind.F and action.stage > 0:
            assert at[tl.Action(action.stage - 1, Kind.F, action.microbatch)] < number
        if action.kind in (Kind.B, Kind.I) and action.stage + 1 < plan.stages:
            later = [tl.Action(action.stage + 1, k, action.microbatch) for k in (Kind.B, Kind.I)]
            assert any(at.get(each, number) < number for each in later)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_order_for_all_ranks(name: str, ranks: int) -> None:
    plan = build(name, ranks=ranks, microbatches=2 * ranks)
    runnable = Runnable(plan)
    for program in (runnable.lowered, runnable.forward_only):
        in_order(program, merged(program))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_every_rank_runs_in_the_callers_thread(schedule: str) -> None:
    seen: set[tuple[int, int]] = set()
    stages = [
        Watched(lambda *_: seen.add((threading.get_ident(), threading.active_count())))
        for _ in range(4)
    ]
    pipe = pipeline(*stages, schedule=schedule, ranks=4 if schedule == "1f1b" else 2)
    here = {(threading.get_ident(), threading.active_count())}
    for _ in range(2):
        pipe.step(X, target=Y)
        pipe.eval(X)
    assert seen == here


def test_what_a_rank_is_sent_is_the_tensor_itself() -> None:
    given: list[int] = []
    taken: list[int] = []
    stages = [
        Watched(lambda _, y: given.append(y.data_ptr())),
        Watched(lambda x, _: taken.append(x.data_ptr())),
    ]
    pipe = pipeline(*stages)
    for _ in range(2):
        pipe.step(X, target=Y)
    assert given == taken


@pytest.mark.parametrize("microbatches", [4, 32])
def test_no_rank_runs_ahead_in_an_evaluation(microbatches: int) -> None:
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    def seen(_: Tensor, output: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(output.untyped_storage()))
        most = max(most, sum(each() is not None for each in alive))

    pipe = pipeline(*[Watched(seen) for _ in range(4)], microbatches=microbatches)
    pipe.eval(torch.ones(32, 4), target=torch.zeros(32, 4))
    assert most <= 4


def test_a_micro_batch_goes_through_all_stages_before_the_next() -> None:
    calls: list[int] = []
    stages = [Watched(lambda *_, s=stage: calls.append(s)) for stage in range(4)]
    pipe = pipeline(*stages, schedule="gpipe")
    pipe.step(X, target=Y)  # learns what crosses boundaries
    backward: list[int] = []
    for stage, module in enumerate(stages):
        module.weight.register_post_accumulate_grad_hook(lambda _, s=stage: backward.append(s))
    calls.clear()
    pipe.step(X, target=Y)
    assert calls == [0, 1, 2, 3] * 4
    assert backward == [3, 2, 1, 0] * 4


def test_where_ranks_draw_they_keep_the_order_of_the_plan() -> None:
    calls: list[int] = []
    stages = [Watched(lambda *_, s=stage: calls.append(s)) for stage in range(4)]
    pipe = pipeline(*stages, schedule="interleaved_1f1b", ranks=2)
    pipe.step(X, target=Y)
    planned = calls.copy()
    calls.clear()
    pipe.step(X, target=Y)
    assert calls != planned
    stages[2].seen = lambda _, output: calls.append(2) or output * torch.rand(())
    pipe = pipeline(*stages, schedule="interleaved_1f1b", ranks=2)
    for _ in range(3):
        calls.clear()
        pipe.step(X, target=Y)
        assert calls == planned


def test_a_plan_with_another_order_backward_is_kept() -> None:
    calls: list[int] = []
    plan = Plan.from_actions([["0F0", "0F1", "1F0", "1F1", "1B1", "0B1", "1B0", "0B0"]])
    modules = [Watched(lambda *_, s=stage: calls.append(s)) for stage in range(2)]
    stages = [tl.PipelineStage(m, s, 2, CPU) for s, m in enumerate(modules)]
    schedule = tl.ScheduleFromPlan(stages, plan, nn.functional.mse_loss)
    for _ in range(2):
        calls.clear()
        schedule.step(X, target=Y)
        assert calls == [0, 0, 1, 1]


def test_all_ranks_draw_from_the_generator_of_the_process() -> None:
    drawn: list[float] = []
    stages = [Watched(lambda *_: drawn.append(torch.rand(()).item())) for _ in range(3)]
    pipe = pipeline(*stages)
    torch.manual_seed(3)
    for _ in range(2):
        pipe.step(X, target=Y)
    torch.manual_seed(3)
    assert drawn == [torch.rand(()).item() for _ in range(24)]


class Fails(torch.autograd.Function):
    """Cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("on purpose")


def fail(*_: object) -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("backward", [False, True], ids=["F", "B"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("stage", range(4))
def test_an_error_names_its_stage(schedule: str, stage: int, backward: bool) -> None:
    stages = [Watched() for _ in range(4)]
    pipe = pipeline(*stages, schedule=schedule, ranks=4 if schedule == "1f1b" else 2)
    expected = [pipe.step(X, target=Y), pipe.step(X, target=Y)][-1]
    stages[stage].seen = (lambda _, output: Fails.apply(output)) if backward else fail
    with pytest.raises(StageError) as caught:
        pipe.step(X, target=Y)
    rank, action = stage if schedule == "1f1b" else [0, 1, 1, 0][stage], "FB"[backward]
    assert str(caught.value) == (
        f"rank {rank}, stage {stage}, micro-batch 0 ({stage}{action}0): ValueError: on purpose"
    )
    stages[stage].seen = nothing
    assert pipe.step(X, target=Y) == expected


def test_ctrl_c_in_a_rank() -> None:
    stages = [Watched() for _ in range(3)]
    pipe = pipeline(*stages)
    expected = pipe.step(X, target=Y)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    stages[1].seen = interrupt
    with pytest.raises(KeyboardInterrupt):
        pipe.step(X, target=Y)
    stages[1].seen = nothing
    assert pipe.step(X, target=Y) == expected


class Lends(nn.Module):
    """Hands its weight on beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight


class Borrows(nn.Module):
    """Uses the weight of the stage before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x) @ weight


def test_a_weight_that_is_handed_on_keeps_no_hooks() -> None:
    """Each micro-batch of each step left one on it."""
    first = Lends()
    pipe = pipeline(first, Borrows())
    for _ in range(3):
        pipe.step(X, target=Y)
    assert not first.linear.weight._backward_hooks


def test_the_halves_of_a_backward_are_one_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are the same, and a trace shows each half by itself."""
    torch.manual_seed(0)
    actions = [f"0{kind}{m}" for m in range(4) for kind in "FIW"]
    stage = tl.PipelineStage(Watched(draw), 0, 1, CPU)
    pipe = tl.ScheduleFromPlan([stage], Plan.from_actions([actions]), nn.functional.mse_loss)
    calls: list[Kind] = []
    for kind, name in ((Kind.B, "backward"), (Kind.I, "backward_input")):
        method = getattr(tl.PipelineStage, name)
        monkeypatch.setattr(
            tl.PipelineStage,
            name,
            lambda *args, kind=kind, method=method: calls.append(kind) or method(*args),
        )
    pipe.step(X, target=Y)  # learns the shapes
    found = []
    for trace in (False, True):
        calls.clear()
        stage.submod.zero_grad()
        if trace:
            with pipe.trace() as seen:
                pipe.step(X, target=Y)
            kinds = [span.action.kind for span in seen.timeline.spans(0)]
            assert kinds.count(Kind.I) == kinds.count(Kind.W) == 4
        else:
            pipe.step(X, target=Y)
        assert calls == [Kind.I if trace else Kind.B] * 4
        found.append([parameter.grad for parameter in stage.submod.parameters()])
    assert all(map(torch.equal, *found))


def test_halves_with_other_actions_between_them_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.from_actions([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    stage = tl.PipelineStage(nn.Linear(4, 4), 0, 1, CPU)
    monkeypatch.setattr(stage, "backward", lambda *_: pytest.fail("I and W do not meet here"))
    tl.ScheduleFromPlan([stage], plan, nn.functional.mse_loss).step(X, target=Y)
    assert all(parameter.grad is not None for parameter in stage.submod.parameters())


@pytest.mark.parametrize("of", ["its class", "itself"])
def test_a_stage_with_halves_of_its_own_keeps_them(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    class Own(tl.PipelineStage):
        def backward_weight(self, microbatch: int) -> None:
            called.append(microbatch)
            super().backward_weight(microbatch)

    plan = Plan.from_actions([["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]])
    make = Own if of == "its class" else tl.PipelineStage
    stage = make(nn.Linear(4, 4), 0, 1, CPU)
    if of == "itself":
        monkeypatch.setattr(stage, "backward_weight", called.append)
    tl.ScheduleFromPlan([stage], plan, nn.functional.mse_loss).step(X, target=Y)
    assert called == [0, 1]


def test_a_local_rank_has_no_local_ranks() -> None:
    with pytest.raises(TransportError, match=r"^rank 0 is a local rank and cannot run local"):
        tl.local.run(lambda rank: pipeline(nn.Linear(4, 4), nn.Linear(4, 4)) and None, 1)
