"""Bad input: the same clear error on every rank, nothing hangs, and the next step works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import taktline as tl
from taktline.errors import BatchError
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
    **options: Any,
) -> Any:
    """A schedule over stages of one linear layer."""
    torch.manual_seed(rank)
    indices = [rank] if stages is None else stages
    made = [
        tl.PipelineStage(module or nn.Linear(4, 4), i, num_stages, CPU, group=group, **options)
        for i in indices
    ]
    single = schedule in (tl.Schedule1F1B, tl.ScheduleGPipe)
    return schedule(made[0] if single else made, microbatches, nn.functional.mse_loss)


def run(schedule: Any, call: str = "step", size: int = 8, width: int = 4) -> Any:
    batch = torch.ones(size, width)
    return getattr(schedule, call)(batch, target=torch.zeros(size, 4))


def assert_all(errors: list[Any], kind: type[Exception], text: str) -> None:
    """The same error, on every rank."""
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    assert {str(error) for error in errors} == {text}


def batch_too_small(rank: int, group: Any) -> None:
    run(make(rank, group), size=3)


def test_a_batch_that_is_too_small(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(batch_too_small),
        BatchError,
        "rank 0: argument 0 is float32[3, 4]: 3 along dimension 0 cannot be cut into 4 "
        "micro-batches; pass at least 4, or use at most 3 micro-batches",
    )


def batches_of_two_sizes(rank: int, group: Any) -> None:
    run(make(rank, group), size=8 - 2 * rank)


def test_arguments_and_target_of_different_batches(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(batches_of_two_sizes),
        tl.MismatchError,
        f"the batch has 8 rows, but the target on rank 1 has 6; {OF_ONE_BATCH}",
    )


def no_target(rank: int, group: Any) -> None:
    make(rank, group).step(torch.ones(8, 4))


def test_training_without_a_target(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(no_target),
        BatchError,
        "rank 1: step() trains, so the rank of the last stage needs target=… for loss_fn; call "
        "eval() to run forward only",
    )


def without_gradients(rank: int, group: Any) -> None:
    with torch.no_grad():
        run(make(rank, group))


def test_training_without_gradients(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(without_gradients),
        tl.MismatchError,
        "rank 0: step() trains, but under torch.no_grad() it cannot; call eval()",
    )


def two_calls(rank: int, group: Any) -> None:
    run(make(rank, group), "step" if rank == 0 else "eval")


def test_ranks_that_train_and_ranks_that_evaluate(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(two_calls),
        tl.MismatchError,
        "the ranks disagree on the call: step() on rank 0; eval() on rank 1; make the same calls "
        "in the same order on every rank",
    )


def two_counts(rank: int, group: Any) -> None:
    run(make(rank, group, microbatches=4 + rank), size=40)


def test_different_numbers_of_microbatches(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(two_counts),
        tl.MismatchError,
        "the ranks do not build the same pipeline: option microbatches is 4 on rank 0, but 5 on "
        "rank 1; build the same model with the same options and cuts on every rank",
    )


def two_schedules(rank: int, group: Any) -> None:
    run(make(rank, group, schedule=(tl.Schedule1F1B, tl.ScheduleGPipe)[rank]))


def test_different_schedules(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(two_schedules),
        tl.MismatchError,
        "the ranks do not build the same pipeline: option schedule is Schedule1F1B on rank 0, but "
        "ScheduleGPipe on rank 1; build the same model with the same options and cuts on every "
        "rank",
    )


def two_plans(rank: int, group: Any) -> None:
    first = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    second = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    plan = tl.Plan.from_actions(second if rank else first)
    stage = tl.PipelineStage(nn.Linear(4, 4), rank, 2, CPU, group=group)
    run(tl.ScheduleFromPlan([stage], plan, nn.functional.mse_loss))


def test_different_plans(outcomes: Outcomes) -> None:
    errors = outcomes(two_plans)
    assert {type(error) for error in errors} == {tl.MismatchError}
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("the ranks do not build the same pipeline: option plan is ")


def steps_of_two_schedules(rank: int, group: Any) -> None:
    first, second = make(rank, group), make(rank, group, microbatches=2)
    for schedule in (first, second):
        run(schedule)
    run((first, second)[rank])


def test_ranks_that_step_different_schedules(outcomes: Outcomes) -> None:
    errors = outcomes(steps_of_two_schedules)
    assert {type(error) for error in errors} == {tl.MismatchError}
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]) == (
        "the ranks step different schedules, counted by their first steps: number 1 on rank 0; "
        "number 2 on rank 1; step the same schedules in the same order on every rank"
    )


def a_schedule_too_many(rank: int, group: Any) -> int:
    schedules = [make(rank, group) for _ in range(1 + rank)]
    run(schedules[-1])
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
        "the ranks are in different calls of step() and eval(): number 1 on rank 0; number 2 on "
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


def resumed(rank: int, group: Any) -> None:
    schedule = make(rank, group)
    if rank == 0:
        schedule.steps = 100
    run(schedule)


def test_ranks_that_have_made_different_numbers_of_steps(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(resumed),
        tl.MismatchError,
        "the ranks disagree on the number of training steps so far: 100 on rank 0; 0 on rank 1; "
        "set steps on every rank when you resume",
    )


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even a text")


class Mine(tl.TaktlineError):
    """A user's own class, which is no class of Taktline's on another rank."""

    def __init__(self, one: str, *, other: str) -> None:
        self.one = one
        super().__init__(f"{one}, {other}")


class Raising(nn.Linear):
    raises: Any = None

    def forward(self, input: Tensor) -> Tensor:
        if self.raises is not None:
            raise self.raises
        return super().forward(input)


def raising(rank: int, group: Any, what: str, where: str) -> None:
    kinds = {
        "wordless": Wordless(),
        "mine": Mine("one", other="other"),
        "long": ValueError("x" * 3_000_000),
    }
    module = Raising(4, 4)
    schedule = make(rank, group, module=module)
    if where == "forward" and rank == 1:
        module.raises = kinds[what]
    elif rank == 1:

        def loss_weights(target: Tensor) -> float:
            raise kinds[what]

        schedule.step(torch.ones(8, 4), target=torch.zeros(8, 4), loss_weights=loss_weights)
    run(schedule)


@pytest.mark.parametrize("where", ["forward", "preparation"])
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("wordless", "Wordless: (its text cannot be read: RuntimeError)"),
        ("mine", "one, other"),
        ("long", f"ValueError: {'x' * 1000}"),
    ],
)
def test_errors_that_are_hard_to_print(
    outcomes: Outcomes, what: str, text: str, where: str
) -> None:
    for error in outcomes(raising, what, where):
        assert isinstance(error, tl.TaktlineError)
        prefix = "rank 1, stage 1, micro-batch 0 (1F0): " if where == "forward" else "rank 1: "
        assert str(error).startswith(prefix)
        assert text in str(error)
        assert len(str(error)) < 70_000


def batches_of_their_own(rank: int, group: Any, what: str) -> list[Any]:
    """Steps with data that each rank draws for itself."""
    schedule, torch_seed = make(rank, group), 7
    shared = torch.Generator().manual_seed(torch_seed)
    own = torch.Generator().manual_seed(torch_seed + rank)
    found: list[Any] = []
    for _ in range(2):
        x, target = torch.randn(8, 4, generator=shared), torch.randn(8, 4, generator=shared)
        if what == "arguments":
            x = torch.randn(8, 4, generator=own)
        if what == "targets":
            target = torch.randn(8, 4, generator=own)
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
    for number in range(3):
        if rank == 1 and number == 1:
            continue
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


def held(rank: int, group: Any, stages: list[list[int]], num_stages: int = 4) -> None:
    run(
        make(
            rank,
            group,
            stages=stages[rank],
            num_stages=num_stages,
            schedule=tl.ScheduleInterleaved1F1B,
        )
    )


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (
            [[0, 1], [2, 3]],
            "rank 0 has stages 0, 1 and needs stages 0, 2; rank 1 has stages 2, 3 and needs "
            "stages 1, 3",
        ),
        (
            [[0, 2], [1]],
            "rank 1 has stage 1 and needs stages 1, 3",
        ),
        (
            [[0, 2], [1, 1]],
            "rank 1 has stages 1, 1 and needs stages 1, 3",
        ),
        (
            [[0, 2, 3], [1, 3]],
            "rank 0 has stages 0, 2, 3 and needs stages 0, 2",
        ),
    ],
)
def test_stages_that_do_not_fit(outcomes: Outcomes, stages: list[list[int]], text: str) -> None:
    beginning = "the stages are not where the schedule runs them: "
    assert_all(outcomes(held, stages), tl.MismatchError, f"{beginning}{text}")


def test_stages_that_no_number_of_ranks_shares_evenly(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(held, [[0, 2], [1]], 3),
        tl.MismatchError,
        "rank 0: ScheduleInterleaved1F1B: 3 stages do not divide evenly among 2 ranks; cut the "
        "model into a multiple of 2",
    )


def plan_for_four(rank: int, group: Any) -> None:
    plan = tl.build("1f1b", ranks=4, microbatches=4)
    stage = tl.PipelineStage(nn.Linear(4, 4), rank, 4, CPU, group=group)
    run(tl.ScheduleFromPlan([stage], plan, nn.functional.mse_loss))


def test_a_plan_for_other_ranks(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(plan_for_four),
        tl.MismatchError,
        "rank 0: plan '1f1b' is for 4 ranks, not 2; build it for 2, or start 4",
    )


def other_counts(rank: int, group: Any) -> None:
    plan = tl.build("1f1b", ranks=2, microbatches=4)
    stage = tl.PipelineStage(nn.Linear(4, 4), rank, 4, CPU, group=group)
    run(tl.ScheduleFromPlan([stage], plan, nn.functional.mse_loss))


def test_stages_of_another_model(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(other_counts),
        tl.MismatchError,
        "rank 0: stage 0 is one of 4 (num_stages), but the plan has 2 stages; make them equal",
    )


def other_shape(rank: int, group: Any) -> None:
    example = torch.ones(2, 8) if rank == 1 else None
    run(make(rank, group, input_args=example))


def test_an_output_that_the_next_stage_does_not_expect(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(other_shape),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1F0): SignatureError: input 0 is float32[2, 4], not "
        "float32[2, 8]; input_args of this stage is (float32[2, 8])",
    )


class Fails(nn.Linear):
    """Fails in one forward or backward."""

    def __init__(self, at: int, backward: bool) -> None:
        super().__init__(4, 4)
        self.at = at
        self.backward = backward
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:
        here = self.calls == self.at
        self.calls += 1
        if here and not self.backward:
            raise RuntimeError("no luck today")
        output = super().forward(input)
        if here:
            output.register_hook(_fail)
        return output


def _fail(gradient: Tensor) -> Tensor:
    raise RuntimeError("no luck today")


def fails_once(
    rank: int, group: Any, schedule: str, failing: int, at: int, backward: bool, before: int
) -> Any:
    """Steps, then one that fails, then one that works again; returns its error and gradients."""
    per_rank = 1 if schedule in ("Schedule1F1B", "ScheduleGPipe") else 2
    plan = tl.build(schedule, ranks=2, microbatches=4, stages_per_rank=per_rank)
    mine = plan.placement.stages_of(rank)
    module = Fails(at + 4 * before, backward) if rank == failing else None
    made = []
    for number, index in enumerate(mine):
        torch.manual_seed(index)
        part = module if module is not None and number == 0 else nn.Linear(4, 4)
        made.append(tl.PipelineStage(part, index, plan.stages, CPU, group=group))
    pipe = tl.ScheduleFromPlan(made, plan, nn.functional.mse_loss)
    for _ in range(before):
        run(pipe)
    with pytest.raises(tl.StageError) as caught:
        run(pipe)
    gradients = []
    for _ in range(2):
        for stage in made:
            stage.submod.zero_grad()
        run(pipe)
        gradients.append([p.grad.clone() for s in made for p in s.submod.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
    return caught.value, caught.value.__cause__


@pytest.mark.sampled(3)
@pytest.mark.parametrize("before", [0, 2], ids=["in the first step", "later"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_a_stage_that_fails(
    outcomes: Outcomes, schedule: str, failing: int, backward: bool, before: int
) -> None:
    results = outcomes(fails_once, schedule, failing, 2, backward, before)
    assert not [result for result in results if isinstance(result, Exception)], results
    errors = [error for error, _ in results]
    assert_all(errors, tl.StageError, str(errors[0]))
    error = errors[1 - failing]
    assert error.rank == failing
    assert error.stage == failing
    assert error.microbatch == 2
    kinds = ("B", "I", "W") if backward else ("F",)
    assert error.action in [f"{failing}{kind}2" for kind in kinds]
    where = f"rank {failing}, stage {failing}, micro-batch 2 ({error.action})"
    assert str(error) == f"{where}: RuntimeError: no luck today"
    assert str(results[failing][1]) == "no luck today"


def no_scalar(rank: int, group: Any, reduction: str) -> None:
    stage = tl.PipelineStage(nn.Linear(4, 4), rank, 2, CPU, group=group)
    loss_fn = nn.MSELoss(reduction=reduction)
    run(tl.ScheduleGPipe(stage, 4, loss_fn if reduction == "none" else _as_float))


def _as_float(output: Tensor, target: Tensor) -> Any:
    return nn.functional.mse_loss(output, target).item()


@pytest.mark.parametrize(
    ("reduction", "told"), [("none", "a tensor of shape [2, 4]"), ("mean", "float")]
)
def test_a_loss_that_is_no_number(outcomes: Outcomes, reduction: str, told: str) -> None:
    assert_all(
        outcomes(no_scalar, reduction),
        tl.StageError,
        "rank 1, stage 1, micro-batch 0 (1F0): LossError: loss_fn must return one number as a "
        f"tensor, not {told}",
    )


class Grows(nn.Linear):
    """Gives another shape each step."""

    steps = 0

    def forward(self, input: Tensor) -> Tensor:
        type(self).steps += 1
        output = super().forward(input)
        return output if self.steps <= 4 else torch.cat([output, output])


def changes_shape(rank: int, group: Any) -> None:
    Grows.steps = 0
    schedule = make(rank, group, module=Grows(4, 4) if rank == 0 else None)
    run(schedule)
    run(schedule)


def test_an_output_that_changes_although_the_inputs_do_not(outcomes: Outcomes) -> None:
    assert_all(
        outcomes(changes_shape),
        tl.StageError,
        "rank 0, stage 0, micro-batch 0 (0F0): SignatureError: output 0 is float32[4, 4], not "
        "float32[2, 4], as it was for inputs of the same shapes before; if the output depends on "
        "their values, pass dynamic_shapes=True to the schedule",
    )
