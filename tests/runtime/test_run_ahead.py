"""Steps that do not wait for other ranks: the same gradients, and errors that reach every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import taktline as tl
from taktline.runtime.losses import LateLoss
from tests.workers import Workers

pytestmark = pytest.mark.processes

WIDTH = 6
SECONDS = 60.0
"""How long a rank waits for a sign of another one before the test fails."""


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def pipeline(
    group: dist.ProcessGroup, stages: list[nn.Module] | None = None, **options: Any
) -> tl.Pipeline:
    given: dict[str, Any] = {
        "schedule": "zb_h2",
        "microbatches": 4,
        "loss_fn": nn.functional.mse_loss,
        "mesh": DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",)),
        "run_ahead": True,
    }
    return tl.Pipeline(stages or layers(group.size()), **(given | options))


def batches(count: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)) for _ in range(count)]


def trained(rank: int, group: Any, schedule: str, per_rank: int, ahead: bool) -> list[Any]:
    """Losses and weights of a training run with all that may come between two steps."""
    pipe = pipeline(group, layers(per_rank * group.size()), schedule=schedule, run_ahead=ahead)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses: list[Tensor] = []
    late = 0
    for number, (x, y) in enumerate([*batches(5), *batches(2, 4), *batches(4)]):
        if number == 3:
            each: list[Tensor] = []
            loss, output = pipe.step(x, target=y, return_outputs=True, losses=each)
            losses += [*each, output.sum()]
        else:
            loss = pipe.step(x, target=y)
        losses.append(loss)
        late += isinstance(loss, LateLoss)
        if number == 4:
            losses.append(pipe.grad_norm())
        optimizer.step()
        optimizer.zero_grad()
        if number == 8:
            losses.append(pipe.eval(x, target=y))
    values = [loss.item() for loss in losses]
    return [late, values, [p.detach().clone() for p in pipe.parameters()]]


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("zb_h2", 1), ("zbv", 2)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_is_the_same_to_the_last_bit(
    workers: Workers, schedule: str, per_rank: int, ranks: int
) -> None:
    waiting = workers.run(trained, schedule, per_rank, False, ranks=ranks)
    ahead = workers.run(trained, schedule, per_rank, True, ranks=ranks)
    # Late on the ranks without the last stage, but for the first two steps, where the number of
    # rows has changed, and where all losses are wanted.
    has_last = ranks - 1 if per_rank == 1 else 0
    assert [each[0] for each in ahead] == [0 if rank == has_last else 6 for rank in range(ranks)]
    for (_, values, weights), (_, expected, others) in zip(ahead, waiting, strict=True):
        assert values == expected
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def wait_for(path: Path) -> None:
    end = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.005)


class Signs(nn.Module):
    """Leaves a file at its first forward in each step."""

    def __init__(self, folder: Path, microbatches: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.folder, self.microbatches, self.calls = folder, microbatches, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.calls % self.microbatches == 0:
            (self.folder / str(self.calls // self.microbatches)).touch()
        self.calls += 1
        return self.linear(x)


def at_weight(pipe: tl.Pipeline, number: int, act: Callable[[], None]) -> None:
    """Call a function before the W of this number, counted over all steps from 1."""
    ((stage,),) = (schedule._stages for schedule in pipe.schedules.values())
    plain, calls = stage.backward_weight, 0

    def backward_weight(microbatch: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        plain(microbatch)

    stage.backward_weight = backward_weight


def overtaken(rank: int, group: Any, folder: Path) -> list[float]:
    """The last rank ends its fourth step only after the first rank has begun the fifth."""
    pipe = pipeline(group, [Signs(folder, 4), nn.Linear(WIDTH, WIDTH)])
    if rank == 1:
        at_weight(pipe, 16, lambda: wait_for(folder / "4"))
    return [float(loss) for loss in [pipe.step(x, target=y) for x, y in batches(6)]]


def test_a_rank_begins_a_step_while_another_one_is_in_the_step_before(
    workers: Workers, tmp_path: Path
) -> None:
    first, second = workers.run(overtaken, tmp_path)
    assert first == second


def read_alone(rank: int, group: Any) -> list[str]:
    """Rank 0 reads a loss while rank 1 waits for rank 0 elsewhere."""
    pipe = pipeline(group)
    kinds: list[str] = []
    for x, y in batches(4):
        loss = pipe.step(x, target=y)
        kinds.append(type(loss).__name__)
        if rank == 0:
            assert loss.item() > 0
        dist.barrier(group)
    return kinds


def test_a_loss_is_read_without_the_help_of_other_ranks(workers: Workers) -> None:
    assert workers.run(read_alone) == [
        ["Tensor", "Tensor", "LateLoss", "LateLoss"],
        ["Tensor"] * 4,
    ]


@pytest.mark.parametrize(
    "use",
    [
        torch.Tensor.clone,
        torch.tensor,
        torch.as_tensor,
        lambda loss: torch.tensor([loss]),
        lambda loss: loss.as_subclass(Tensor),
        lambda loss: torch.zeros(1).fill_(loss),
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_each_use_of_a_late_loss_reads_it(use: Callable[[Tensor], Tensor]) -> None:
    loss = LateLoss.like(torch.zeros(()), lambda: torch.tensor(0.5))
    assert use(loss).tolist() in (0.5, [0.5])


class Fails(nn.Module):
    """Raises in one of its forwards."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.at, self.calls = at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise ValueError("no luck")
        return self.linear(x)


def first_error(pipe: tl.Pipeline) -> tuple[tl.StageError, int]:
    """The error that a training run ends with, and the steps before it."""
    for steps, (x, y) in enumerate(batches(8)):
        try:
            pipe.step(x, target=y)
        except tl.StageError as error:
            return error, steps
    raise AssertionError("no step has failed")


def failing(rank: int, group: Any, bad: int) -> list[Any]:
    """A stage that fails in its fourth step, and what follows."""
    stages = layers(group.size())
    stages[bad] = Fails(4 * 3 + 2)
    pipe = pipeline(group, stages)
    error, steps = first_error(pipe)
    known = [error.rank, error.stage, error.microbatch, str(error), error.recoverable]
    pipe.reconnect()
    pipe.zero_grad()
    return [known, steps, [pipe.step(x, target=y).item() for x, y in batches(4)]]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_of_one_rank_is_raised_on_all(workers: Workers, bad: int) -> None:
    found = workers.run(failing, bad, ranks=3)
    for known, steps, losses in found:
        assert known[:3] == [bad, bad, 1]
        assert known[3].endswith("ValueError: no luck")
        assert known[4] == "reconnect"
        assert steps == 3  # no rank can end a step of which it needs a forward
        assert losses == found[0][2]


def failing_late(rank: int, group: Any, folder: Path) -> list[Any]:
    """The last rank fails in the last W of its fourth step, when the first one is in the fifth."""
    pipe = pipeline(group, [Signs(folder, 4), nn.Linear(WIDTH, WIDTH)])

    def fail() -> None:
        wait_for(folder / "4")
        raise ValueError("no luck")

    if rank == 1:
        at_weight(pipe, 16, fail)
    error, steps = first_error(pipe)
    with pytest.raises(tl.MismatchError) as caught:
        pipe.reconnect()
    return [str(error), steps, str(caught.value), caught.value.recoverable]


def test_a_late_error_is_raised_in_the_next_call_and_weights_may_differ(
    workers: Workers, tmp_path: Path
) -> None:
    first, second = workers.run(failing_late, tmp_path)
    assert (first[1], second[1]) == (4, 3)
    assert first[0] == second[0]
    assert "ValueError: no luck" in first[0]
    for found in (first, second):
        assert found[2].startswith("the latest step has ended on some ranks only (training steps:")
        assert found[3] == "restart"


def strayed(rank: int, group: Any, stray: str) -> list[Any]:
    """Rank 1 does something else than a step, or has another batch."""
    pipe = pipeline(group)
    try:
        for number, (x, y) in enumerate(batches(8)):
            if rank == 1 and number == 4:
                if stray == "grad_norm()":
                    pipe.grad_norm()
                x, y = x[:4], y[:4]
            pipe.step(x, target=y)
    except tl.MismatchError as error:
        return [str(error), error.recoverable]
    return []


@pytest.mark.parametrize("stray", ["grad_norm()", "step()"])
def test_a_rank_in_another_call_is_reported_on_all(workers: Workers, stray: str) -> None:
    expected = (
        f"rank 0 is in a step, but rank 1 is in {stray}, or has a batch of another kind or size; "
        "make the same calls with the same batch on every rank"
    )
    for text, recoverable in workers.run(strayed, stray):
        assert text == expected
        assert recoverable == "reconnect"


def other_data(rank: int, group: Any) -> list[Any]:
    """Rank 1 gets other samples from the third step on."""
    pipe = pipeline(group)
    found = batches(8)
    for number, (x, y) in enumerate(found):
        try:
            pipe.step(x + rank * (number > 2), target=y)
        except tl.MismatchError as error:
            return [number, str(error)]
    return []


def test_other_samples_on_a_rank_are_found_two_steps_later(workers: Workers) -> None:
    first, second = workers.run(other_data)
    assert first == second
    assert first[0] == 5
    assert first[1].startswith("an earlier step: the ranks were given different arguments")


def without_batch(rank: int, group: Any) -> list[Any]:
    """Rank 1 passes only the target."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("taktline").addHandler(handler)
    pipe = pipeline(group)
    losses = [pipe.step(*([x] if rank == 0 else []), target=y) for x, y in batches(4)]
    logging.getLogger("taktline").removeHandler(handler)
    return [messages, [type(loss) is Tensor for loss in losses]]


def test_ranks_without_the_batch_are_named_and_wait(workers: Workers) -> None:
    for messages, plain in workers.run(without_batch):
        assert messages == [
            "run_ahead has no effect: pass the whole batch, with its target, on every rank; ranks "
            "got a batch on rank 0; none on rank 1"
        ]
        assert all(plain)


def refused(rank: int, group: Any, case: str) -> str:
    options: dict[str, Any] = {}
    if case == "some ranks":
        options["run_ahead"] = rank == 0
    elif case == "dynamic_shapes":
        options["dynamic_shapes"] = True
    else:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        options["data_parallel"] = "ddp"
    pipe = pipeline(group, layers(2), **options)
    x, y = batches(1)[0]
    with pytest.raises(tl.MismatchError) as caught:
        pipe.step(x, target=y)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "ranks", "text"),
    [
        (
            "some ranks",
            2,
            "the ranks disagree on the value of run_ahead: True on rank 0; False on rank 1; pass "
            "the same on every rank",
        ),
        ("dynamic_shapes", 2, "run_ahead needs shapes that are known; leave out dynamic_shapes"),
        (
            "replicas",
            4,
            "run_ahead works for one pipeline whose stages are each on one rank; here replicas or "
            "tensor-parallel ranks share the work of stages, so leave it out",
        ),
    ],
)
def test_what_does_not_go_together(workers: Workers, case: str, ranks: int, text: str) -> None:
    for found in workers.run(refused, case, ranks=ranks):
        assert text in found


def in_turns(rank: int, group: Any) -> list[list[float]]:
    """Two pipelines over the same ranks, stepped in turns and then one after the other."""
    pipes = [pipeline(group), pipeline(group, schedule="1f1b")]
    found: list[list[float]] = [[], []]
    for number, (x, y) in enumerate([*batches(3), *batches(3)]):
        for place in (0, 1) if number < 3 else (number % 2, number % 2):
            found[place].append(float(pipes[place].step(x, target=y)))
    return found


def test_two_pipelines_over_the_same_ranks(workers: Workers) -> None:
    first, second = workers.run(in_turns)
    assert first == second
    model = nn.Sequential(*layers(2))
    expected = [nn.functional.mse_loss(model(x), y).item() for x, y in batches(3)]
    assert first[0][:3] == pytest.approx(expected, abs=1e-6)


def traced(rank: int, group: Any) -> list[Any]:
    """Steps of one kind in a trace, before it and after it; rank 1 is slow at the end of one."""
    pipe = pipeline(group)
    if rank == 1:
        at_weight(pipe, 4 * 5, lambda: time.sleep(2))
    found = [pipe.step(x, target=y) for x, y in batches(3)]
    with pipe.trace() as trace:
        found += [pipe.step(x, target=y) for x, y in batches(3)]
    found += [pipe.step(x, target=y) for x, y in batches(3)]
    return [[float(loss) for loss in found], len(trace.timelines)]


def test_steps_in_a_trace_wait_for_each_other(workers: Workers) -> None:
    for losses, timelines in workers.run(traced):
        assert losses[:3] == losses[3:6] == losses[6:]
        assert timelines == 3
