"""Bad input: the same clear error on every rank, nothing hangs, and the next step works."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.errors import BatchError
from tests.runtime.features import Drops, loss_of_sums
from tests.runtime.test_agreement import OF_ONE_BATCH
from tests.workers import Workers

CPU = torch.device("cpu")
Main = Callable[..., Any]
Outcomes = Callable[..., list[Any]]


def _over_local(main: Main, *args: Any, ranks: int = 2) -> list[Any]:
    def caught(rank: int) -> Any:
        try:
            return main(rank, None, *args)
        except Exception as error:
            return error

    return tl.local.run(caught, ranks)


@pytest.fixture(
    params=["local", pytest.param("gloo", marks=pytest.mark.processes)],
)
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """Runs a main on every rank; returns each rank's result or error."""
    if request.param == "local":
        return _over_local
    workers: Workers = request.getfixturevalue("workers")
    return workers.outcomes


def make(
    rank: int,
    group: dist.ProcessGroup | None,
    *,
    module: nn.Module | None = None,
    microbatches: int = 4,
    schedule: Any = tl.Schedule1F1B,
    stages: list[int] | None = None,
    num_stages: int = 2,
    plan: tl.Plan | None = None,
    loss_fn: Any = nn.functional.mse_loss,
    ways: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """A schedule over stages of one linear layer, with options of its own and of the stages."""
    torch.manual_seed(rank)
    indices = [rank] if stages is None else stages
    made = [
        tl.PipelineStage(module or nn.Linear(4, 4), i, num_stages, CPU, group=group, **options)
        for i in indices
    ]
    if plan is not None:
        return tl.ScheduleFromPlan(made, plan, loss_fn, **ways)
    single = schedule in (tl.Schedule1F1B, tl.ScheduleGPipe)
    return schedule(made[0] if single else made, microbatches, loss_fn, **ways)


def run(schedule: Any, call: str = "step", size: int = 8, width: int = 4, **options: Any) -> Any:
    given = {"target": torch.zeros(size, 4)} | options
    return getattr(schedule, call)(torch.ones(size, width), **given)


def assert_all(errors: list[Any], kind: type[Exception], text: str) -> None:
    """The same error, on every rank."""
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    assert {str(error) for error in errors} == {text}


class Fails(nn.Linear):
    """Raises what it is given."""

    def __init__(self, raises: Exception) -> None:
        super().__init__(4, 4)
        self.raises = raises

    def forward(self, input: Tensor) -> Tensor:
        raise self.raises


class Grows(nn.Linear):
    """Gives another shape from the fifth forward on."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        output = super().forward(input)
        return output if self.calls <= 4 else torch.cat([output, output])


class Puts(nn.Linear):
    """Puts and gets as it is told."""

    def __init__(self, puts: tuple[str, ...] = (), gets: tuple[str, ...] = ()) -> None:
        super().__init__(4, 4)
        self.puts = puts
        self.gets = gets

    def forward(self, input: Tensor) -> Tensor:
        x = input
        for name in self.gets:
            x = x + tl.skip.get(name)
        for name in self.puts:
            tl.skip.put(name, x)
        return super().forward(x)


class Recomputes(Puts):
    """Gets a value in a checkpointed block, and puts another one in its place."""

    def forward(self, input: Tensor) -> Tensor:
        x = checkpoint(lambda x: torch.sin(x + tl.skip.get("a")), input, use_reentrant=False)
        tl.skip.put("a", x)
        return super().forward(x + tl.skip.get("a"))


def without_gradients(rank: int, group: Any) -> None:
    with torch.no_grad():
        run(make(rank, group))


def steps_of_two_schedules(rank: int, group: Any) -> None:
    first, second = make(rank, group), make(rank, group, microbatches=2)
    for schedule in (first, second, (first, second)[rank]):
        run(schedule)


def other_steps(rank: int, group: Any) -> None:
    schedule = make(rank, group)
    schedule.steps = 100 * (1 - rank)
    run(schedule)


def values_decide(rank: int, group: Any) -> None:
    """The shapes that a stage returns depend on values."""
    module = Drops(rank, 2)
    schedule = make(rank, group, module=module, microbatches=2, loss_fn=loss_of_sums)
    for value in (1.0, -1.0):
        with torch.no_grad():
            module.linear.weight.zero_()
            module.linear.bias.fill_(value)
            module.linear.bias[:2] = torch.tensor([5.0, -5.0])
        schedule.step(torch.ones(4, 5, 6), target=torch.ones(4, 6))


def cut_in_part(rank: int, group: Any) -> None:
    schedule, x = make(rank, group, plan=FOR_EIGHT), torch.ones(6, 4)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target_mbs=[x[:1]] * 8)


def held(*stages: list[int], count: int = 4) -> Main:
    return lambda r, g: run(
        make(r, g, stages=stages[r], num_stages=count, schedule=tl.ScheduleInterleaved1F1B)
    )


def changes_shape(rank: int, group: Any) -> None:
    schedule = make(rank, group, module=None if rank else Grows(4, 4))
    for _ in range(2):
        run(schedule)


def as_float(output: Tensor, target: Tensor) -> Any:
    return nn.functional.mse_loss(output, target).item()


FOR_FOUR = tl.build("1f1b", ranks=4, microbatches=4)
FOR_TWO = tl.build("1f1b", ranks=2, microbatches=4)
FOR_EIGHT = tl.build("1f1b", ranks=2, microbatches=8)
NOT_THE_SAME = "the ranks do not build the same pipeline: option "
BUILD = "; build the same model with the same options and cuts on every rank"
PLACES = "the stages are not where the schedule runs them: "
WEIGHTS = (
    "micro-batches; pass one for each, or a function of a micro-batch's target: a batch with fewer "
    "rows has fewer"
)
FIRST = "rank 1, stage 1, micro-batch 0 (1F0): "

CASES: dict[str, tuple[Main, type[Exception], str]] = {
    "a small batch": (
        lambda r, g: run(make(r, g), size=3),
        BatchError,
        "rank 0: argument 0 is float32[3, 4]: 3 along dimension 0 cannot be cut into 4 "
        "micro-batches; pass at least 4, or use at most 3 micro-batches",
    ),
    "two sizes": (
        lambda r, g: run(make(r, g), size=8 - 2 * r),
        tl.MismatchError,
        f"the batch has 8 rows, but the target on rank 1 has 6; {OF_ONE_BATCH}",
    ),
    "no target": (
        lambda r, g: make(r, g).step(torch.ones(8, 4)),
        BatchError,
        "rank 1: step() trains, so the rank of the last stage needs target=… for loss_fn; call "
        "eval() to run forward only",
    ),
    "no gradients": (
        without_gradients,
        tl.MismatchError,
        "rank 0: step() trains, but under torch.no_grad() it cannot; call eval()",
    ),
    "step and eval": (
        lambda r, g: run(make(r, g), ("step", "eval")[r]),
        tl.MismatchError,
        "the ranks disagree on the call: step() on rank 0; eval() on rank 1; make the same calls "
        "in the same order on every rank",
    ),
    "two numbers of micro-batches": (
        lambda r, g: run(make(r, g, microbatches=4 + r), size=40),
        tl.MismatchError,
        f"{NOT_THE_SAME}microbatches is 4 on rank 0, but 5 on rank 1{BUILD}",
    ),
    "two schedules": (
        lambda r, g: run(make(r, g, schedule=(tl.Schedule1F1B, tl.ScheduleGPipe)[r])),
        tl.MismatchError,
        f"{NOT_THE_SAME}schedule is Schedule1F1B on rank 0, but ScheduleGPipe on rank 1{BUILD}",
    ),
    "steps of two schedules": (
        steps_of_two_schedules,
        tl.MismatchError,
        "the ranks step different schedules, by the order of their first steps (0: a new one): 1 "
        "on rank 0; 2 on rank 1; step the same schedules in the same order on every rank",
    ),
    "numbers of steps": (
        other_steps,
        tl.MismatchError,
        "the ranks disagree on the number of training steps so far: 100 on rank 0; 0 on rank 1; "
        "set steps on every rank when you resume",
    ),
    "sharing": (
        lambda r, g: run(make(r, g), share_losses=r == 0),
        tl.MismatchError,
        "the ranks disagree on the value of share_losses: True on rank 0; False on rank 1; pass "
        "the same on every rank",
    ),
    "no list": (
        lambda r, g: run(make(r, g), aux_losses=0),
        BatchError,
        "rank 0: aux_losses must be a list to fill, not int",
    ),
    "stages elsewhere": (
        held([0, 1], [2, 3]),
        tl.MismatchError,
        f"{PLACES}rank 0 has stages [0, 1] and needs [0, 2]; rank 1 has stages [2, 3] and needs "
        "[1, 3]",
    ),
    "a stage twice": (
        held([0, 2], [1, 1]),
        tl.MismatchError,
        f"{PLACES}rank 1 has stages [1, 1] and needs [1, 3]",
    ),
    "an odd number of stages": (
        held([0, 2], [1], count=3),
        tl.MismatchError,
        "rank 0: ScheduleInterleaved1F1B: 3 stages do not divide evenly among 2 ranks; cut the "
        "model into a multiple of 2",
    ),
    "a plan for other ranks": (
        lambda r, g: run(make(r, g, plan=FOR_FOUR, num_stages=4)),
        tl.MismatchError,
        "rank 0: plan '1f1b' is for 4 ranks, not 2; build it for 2, or start 4",
    ),
    "stages of another model": (
        lambda r, g: run(make(r, g, plan=FOR_TWO, num_stages=4)),
        tl.MismatchError,
        "rank 0: stage 0 is one of 4 (num_stages), but the plan has 2 stages; make them equal",
    ),
    "an unexpected input": (
        lambda r, g: run(make(r, g, input_args=torch.ones(2, 8) if r else None)),
        tl.StageError,
        f"{FIRST}SignatureError: input 0 is float32[2, 4], not float32[2, 8]; input_args of this "
        "stage is (float32[2, 8])",
    ),
    "a loss for each number": (
        lambda r, g: run(make(r, g, loss_fn=nn.MSELoss(reduction="none"))),
        tl.StageError,
        f"{FIRST}LossError: loss_fn must return one number as a tensor, not a tensor of shape "
        "[2, 4]",
    ),
    "a loss that is no tensor": (
        lambda r, g: run(make(r, g, loss_fn=as_float)),
        tl.StageError,
        f"{FIRST}LossError: loss_fn must return one number as a tensor, not float",
    ),
    "an output that changes": (
        changes_shape,
        tl.StageError,
        "rank 0, stage 0, micro-batch 0 (0F0): SignatureError: output 0 is float32[4, 4], not "
        "float32[2, 4], as it was for inputs of the same shapes before; if the output depends on "
        "their values, pass dynamic_shapes=True to the schedule",
    ),
    "shapes that depend on values": (
        values_decide,
        tl.StageError,
        "rank 0, stage 0, micro-batch 0 (0F0): SignatureError: output 0 is float32[0, 6], not "
        "float32[10, 6]; output 1 is 0, not 10, as it was for inputs of the same shapes before; if "
        "the output depends on their values, pass dynamic_shapes=True to the schedule",
    ),
    "dynamic shapes on one rank": (
        lambda r, g: run(make(r, g, ways={"dynamic_shapes": r == 1})),
        tl.MismatchError,
        f"{NOT_THE_SAME}dynamic_shapes is False on rank 0, but True on rank 1{BUILD}",
    ),
    "three weights": (
        lambda r, g: run(make(r, g), loss_weights=[1, 2, 3]),
        BatchError,
        f"rank 1: loss_weights has 3 numbers, but there are 4 {WEIGHTS}",
    ),
    "more weights than micro-batches": (
        lambda r, g: run(make(r, g, plan=FOR_EIGHT), size=6, loss_weights=[1.0] * 8),
        BatchError,
        f"rank 1: loss_weights has 8 numbers, but there are 6 {WEIGHTS}",
    ),
    "a negative weight": (
        lambda r, g: run(make(r, g), loss_weights=[1, 2, 3, -1]),
        BatchError,
        "rank 1: loss_weights must be numbers from 0 up, not [1.0, 2.0, 3.0, -1.0]",
    ),
    "a weight that is no number": (
        lambda r, g: run(make(r, g), loss_weights=[1, 2, 3, float("nan")]),
        BatchError,
        "rank 1: loss_weights must be numbers from 0 up, not [1.0, 2.0, 3.0, nan]",
    ),
    "no weight": (
        lambda r, g: run(make(r, g), loss_weights=[0] * 4),
        BatchError,
        "rank 1: loss_weights are all 0, so no micro-batch counts; leave out such a batch",
    ),
    "a small batch of which some is cut already": (
        cut_in_part,
        BatchError,
        "rank 1: target_mbs has 8 micro-batches, but this batch has 6; pass 6",
    ),
    "a skip never got": (
        lambda r, g: run(make(r, g, module=(Puts(("a", "b")), Puts(("c",)))[r])),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1F0): SkipError: no stage gets 'a' (put by stage 0), 'b' "
        "(put by stage 0), 'c' (put by stage 1); get each of them, or do not put it",
    ),
    "a skip got too early": (
        lambda r, g: run(make(r, g, module=(Puts(("a",), ("b",)), Puts(("b",), ("a",)))[r])),
        tl.StageError,
        "rank 0, stage 0, micro-batch 0 (0F0): SkipError: stage 0 gets 'b', but no stage up to "
        "here has put it; put it in this stage or an earlier one, before it is got",
    ),
    "a skip got under another name": (
        lambda r, g: run(make(r, g, module=(Puts(("a", "b")), Puts((), ("A",)))[r])),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1F0): SkipError: stage 1 gets 'A', but no stage up to "
        "here has put it; no stage has got 'a' (put by stage 0), 'b' (put by stage 0); put it in "
        "this stage or an earlier one, before it is got",
    ),
    "a skip put twice": (
        lambda r, g: run(make(r, g, module=(Puts(("a",)), Puts(("a",)))[r])),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1F0): SkipError: 'a' is put by stage 0 and again by stage "
        "1, before any stage has got it; use a different name for each value",
    ),
    "a skip replaced before it is got again": (
        lambda r, g: run(make(r, g, module=(Puts(("a",)), Recomputes())[r])),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1B0): SkipError: a checkpointed block of stage 1 gets 'a' "
        "a second time, but the stage has put another value under that name since; use a "
        "different name",
    ),
    "a target that cannot be cut": (
        lambda r, g: run(
            make(r, g, plan=FOR_TWO, ways={"target_chunk_spec": tl.TensorChunkSpec(0)}),
            target=torch.ones(3, 4),
        ),
        BatchError,
        "rank 1: target is float32[3, 4]: 3 along dimension 0 cannot be cut into 4 micro-batches; "
        "pass at least 4, or use at most 3 micro-batches",
    ),
}


def case(rank: int, group: Any, name: str) -> None:
    CASES[name][0](rank, group)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_raise(outcomes: Outcomes, name: str) -> None:
    assert_all(outcomes(case, name), *CASES[name][1:])


def two_plans(rank: int, group: Any) -> None:
    first = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    second = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    run(make(rank, group, plan=tl.Plan.from_actions(second if rank else first)))


def test_different_plans(outcomes: Outcomes) -> None:
    errors = outcomes(two_plans)
    assert_all(errors, tl.MismatchError, str(errors[0]))
    assert str(errors[0]).startswith(f"{NOT_THE_SAME}plan is ")


def a_schedule_too_many(rank: int, group: Any) -> int:
    schedules = [make(rank, group) for _ in range(1 + rank)]
    for _ in range(2):
        run(schedules[-1])
    return schedules[-1].steps


def test_a_schedule_that_one_rank_alone_has_made(outcomes: Outcomes) -> None:
    assert outcomes(a_schedule_too_many) == [2, 2]


def a_call_too_many(rank: int, group: Any) -> None:
    schedule = make(rank, group)
    schedule._runner._calls += rank
    run(schedule)


@pytest.mark.processes
def test_a_call_that_one_rank_alone_has_made(workers: Workers) -> None:
    assert_all(
        workers.outcomes(a_call_too_many),
        tl.MismatchError,
        "the ranks are in different calls of step() and eval(): 1 on rank 0; 2 on "
        "rank 1; a rank has left one out, or made one more. Make the same calls on every rank",
    )


def unheard_of(rank: int, group: Any) -> str:
    """Something that nobody has thought of, on one rank, before any other is asked."""
    schedule = make(rank, group)
    if rank == 1:
        schedule._runner._agree = None
    with pytest.raises((TypeError, tl.TaktlineError)) as caught:
        run(schedule)
    return str(caught.value)


@pytest.mark.processes
def test_an_unexpected_error_reaches_every_rank(workers: Workers) -> None:
    told = "'NoneType' object is not callable"
    assert workers.run(unheard_of) == [
        f"rank 1 has raised TypeError, and left the others behind: {told}",
        told,
    ]


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even a text")


class Mine(tl.TaktlineError):
    """A user's own class, which is no class of Taktline's on another rank."""

    def __init__(self, one: str, *, other: str) -> None:
        self.one = one
        super().__init__(f"{one}, {other}")


HARD: dict[str, tuple[Exception, str]] = {
    "wordless": (Wordless(), "Wordless: (its text cannot be read: RuntimeError)"),
    "mine": (Mine("one", other="other"), "one, other"),
    "long": (ValueError("x" * 3_000_000), f"ValueError: {'x' * 1000}"),
}


def raising(rank: int, group: Any, what: str, forward: bool) -> None:
    error = HARD[what][0]
    options: dict[str, Any] = {}
    if rank == 1 and not forward:

        def loss_weights(target: Tensor) -> float:
            raise error

        options = {"loss_weights": loss_weights}
    run(make(rank, group, module=Fails(error) if rank and forward else None), **options)


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "preparation"])
@pytest.mark.parametrize("what", HARD)
def test_errors_that_are_hard_to_print(outcomes: Outcomes, what: str, forward: bool) -> None:
    for error in outcomes(raising, what, forward):
        assert isinstance(error, tl.TaktlineError)
        assert str(error).startswith(FIRST if forward else "rank 1: ")
        assert HARD[what][1] in str(error)
        assert len(str(error)) < 70_000


def batches_of_their_own(rank: int, group: Any, what: str) -> list[Any]:
    """Steps with data that each rank draws for itself."""
    schedule, found = make(rank, group), list[Any]()
    shared = torch.Generator().manual_seed(7)
    own = torch.Generator().manual_seed(7 + rank)
    for _ in range(2):
        x, target = (
            torch.randn(8, 4, generator=own if what == name else shared)
            for name in ("arguments", "targets")
        )
        try:
            schedule.step(x, target=target)
            found.append(schedule.steps)
        except tl.MismatchError as error:
            found.append(str(error))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("what", ["arguments", "targets", "nothing"])
def test_ranks_with_different_data(workers: Workers, what: str) -> None:
    pattern = (
        rf"the ranks were given different {what}: digest (\w{{8}}) on rank 0; digest "
        r"(\w{8}) on rank 1; inputs would meet the targets of other samples\. Pass every rank of a "
        r"pipeline the same batch: draw it from a generator of its own, or read it on one rank and "
        r"hand it on with pipe\.loader\(…\)"
    )
    first, second = workers.run(batches_of_their_own, what)
    assert first == second
    assert first == [1, 2] if what == "nothing" else all(re.fullmatch(pattern, x) for x in first)


def a_step_left_out(rank: int, group: Any) -> str:
    schedule = make(rank, group)
    for number in (0, 1, 2) if rank == 0 else (0, 2):
        x = torch.full((8, 4), float(number))
        try:
            schedule.step(x, target=x)
        except tl.MismatchError as error:
            return str(error)
    return "nothing was noticed"


@pytest.mark.processes
def test_a_rank_that_leaves_out_a_step(workers: Workers) -> None:
    for text in workers.run(a_step_left_out):
        assert text.startswith("the ranks were given different arguments: digest ")
