"""Tied weights whose gradients cannot be added up: one error on every rank, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import taktline as tl
from taktline.errors import TaktlineError
from taktline.runtime import ties
from tests.runtime.test_ties import CPU, batch, loss_fn, make, three, told
from tests.workers import Workers

Results = Callable[..., list[Any]]


@pytest.fixture(params=["local", pytest.param("gloo", marks=pytest.mark.processes)])
def results(request: pytest.FixtureRequest) -> Results:
    """What a function returns on each rank; one that waits in vain ends with an error."""
    if request.param == "local":
        return lambda run, *args, ranks: tl.local.run(lambda r: run(r, None, *args), ranks)
    workers: Workers = request.getfixturevalue("workers")
    return lambda run, *args, ranks: workers.run(run, *args, ranks=ranks, timeout=30)


class Fault:
    """While inside, the gradients of marked parameters cannot be read."""

    def __init__(self, module: nn.Module, name: str, *, fails: bool) -> None:
        self.parameter: Any = module.get_parameter(name)
        self.parameter.fails = fails

    def end(self) -> None:
        self.parameter.fails = False


def _gradient(parameter: Any) -> Tensor | None:
    if getattr(parameter, "fails", False):
        raise RuntimeError("no memory for it")
    return _original(parameter)


_original = ties._gradient


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    ties._gradient = _gradient
    yield
    ties._gradient = _original


NAMES = {2: ("words.weight", "out.weight"), 3: ("words.weight", "again.weight", "out.weight")}


def scheduled(rank: int, group: dist.ProcessGroup | None, ranks: int) -> tuple[Any, nn.Module]:
    ties._gradient = _gradient  # in this process
    pieces = tl.split.by_hand(make(2) if ranks == 2 else three())
    stage = pieces.build_stage(rank, CPU, group)
    return tl.ScheduleGPipe(stage, 4, loss_fn=loss_fn), stage.submod


def error_of(run: Callable[[], object]) -> str:
    """What is raised, as the others shall hear it."""
    with pytest.raises(TaktlineError) as caught:
        run()
    return f"{type(caught.value).__name__}: {caught.value}"


def gradients(ranks: int) -> dict[str, Tensor]:
    """What the second batch alone should leave."""
    modules = make(2) if ranks == 2 else three()
    model = nn.Sequential(*modules)
    tokens, target = batch(1)
    for x, y in zip(tokens.tensor_split(4), target.tensor_split(4), strict=True):
        (loss_fn(model(x), y) / 4).backward()
    return told(dict(enumerate(modules)))


def fails_in_a_step(
    rank: int, group: Any, ranks: int, failing: int
) -> tuple[str, dict[str, Tensor]]:
    schedule, module = scheduled(rank, group, ranks)
    fault = Fault(module, NAMES[ranks][rank], fails=rank == failing)
    tokens, target = batch(0)
    text = error_of(lambda: schedule.step(tokens, target=target))
    fault.end()
    module.zero_grad()
    tokens, target = batch(1)
    schedule.step(tokens, target=target)
    return text, told({rank: module})


@pytest.mark.parametrize(("ranks", "failing"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_step(results: Results, ranks: int, failing: int) -> None:
    name = NAMES[ranks][failing]
    expected = gradients(ranks)
    for text, found in results(fails_in_a_step, ranks, failing, ranks=ranks):
        assert text == (
            f"StageError: rank {failing}, stage {failing} (gradients of the tied weight {name}): "
            "RuntimeError: no memory for it"
        )
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key])


def fails_at_the_end_of_accumulate(rank: int, group: Any, failing: int) -> list[Any]:
    schedule, module = scheduled(rank, group, 2)
    fault = Fault(module, NAMES[2][rank], fails=rank == failing)
    tokens, target = batch(0)

    def block() -> None:
        with schedule.accumulate():
            schedule.step(tokens, target=target)
            schedule.step(tokens, target=target)

    text = error_of(block)
    fault.end()
    module.zero_grad()
    tokens, target = batch(1)
    with schedule.accumulate():
        schedule.step(tokens, target=target)
    return [text, told({rank: module})]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_end_of_accumulate(results: Results, failing: int) -> None:
    expected = gradients(2)
    for text, found in results(fails_at_the_end_of_accumulate, failing, ranks=2):
        assert text == (
            f"StageError: rank {failing}, stage {failing} (gradients of the tied weight "
            f"{NAMES[2][failing]}): RuntimeError: no memory for it"
        )
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key])


def leaves_accumulate(rank: int, group: Any, steps: int) -> str:
    """One rank leaves the block by an error of its own; the other may be in another step."""
    schedule, _ = scheduled(rank, group, 2)
    tokens, target = batch(0)
    try:
        with schedule.accumulate():
            schedule.step(tokens, target=target)
            if rank == 1:
                raise KeyError("my own")
            for _ in range(steps):
                schedule.step(tokens, target=target)
    except (KeyError, TaktlineError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# The other rank would add up what never comes.
def test_a_block_that_one_rank_leaves_by_an_error(results: Results) -> None:
    assert results(leaves_accumulate, 0, ranks=2) == [
        "MismatchError: rank 1 has left accumulate() by an error, so nothing was added up: "
        "KeyError: 'my own'",
        "KeyError: 'my own'",
    ]


def test_a_block_that_one_rank_leaves_while_the_other_goes_on(results: Results) -> None:
    first, second = results(leaves_accumulate, 1, ranks=2)
    assert first.startswith("MismatchError: ")
    assert "the end of accumulate()" in first
    assert second == "KeyError: 'my own'"


def fails_in_the_program(rank: int, group: Any) -> str:
    """The first rank fails in its last backward, when the other one has its gradients."""
    schedule, module = scheduled(rank, group, 2)
    seen: list[Tensor] = []

    def look(gradient: Tensor) -> None:
        seen.append(gradient)
        if len(seen) == 4:
            raise RuntimeError("out of luck")

    if rank == 0:
        module.get_parameter("scale").register_hook(look)
    tokens, target = batch(0)
    return error_of(lambda: schedule.step(tokens, target=target))


def test_a_rank_that_has_failed_before_takes_part(results: Results) -> None:
    for text in results(fails_in_the_program, ranks=2):
        assert text == (
            "StageError: rank 0, stage 0, micro-batch 3 (0B3): RuntimeError: out of luck"
        )


def loses_its_weight(rank: int, group: Any) -> str:
    schedule, module = scheduled(rank, group, 2)
    tokens, target = batch(0)
    schedule.step(tokens, target=target)
    if rank == 1:
        module.get_submodule("out").register_parameter("weight", None)
    return error_of(lambda: schedule.step(tokens, target=target))


def test_a_weight_that_is_gone(results: Results) -> None:
    for text in results(loses_its_weight, ranks=2):
        assert text.startswith(
            "MismatchError: rank 1: stage 1 has no parameter out.weight, which its ties name"
        )
