"""A pipeline trains on after losses, and its losses and weights are those of the plain loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import taktline as tl
from taktline.errors import UseError
from taktline.train import elastic
from taktline.train.mirrors import free_memory
from taktline.transport.election import LeftBehindError, elect
from taktline.transport.news import ENDED, LOST, News, Vote
from taktline.transport.sockets import NOWHERE
from tests.elastic.job import Outcome, run
from tests.elastic.worker import Job, Strike, plain
from tests.workers import Workers


def survived(job: Job, left: Sequence[int], without: Sequence[int] = (), since: int = 0) -> Outcome:
    """The outcome of a job, after which only these ranks are left, and no update is lost."""
    outcome, expected = run(job), plain(job, without)
    assert not outcome.silent
    for rank in left:
        told = outcome.told[rank]
        assert not told.error
        assert told.ranks == len(left)
        for mine, its in ((told.losses, expected.losses), (told.norms, expected.norms)):
            torch.testing.assert_close(mine[since:], its[since:], rtol=1e-12, atol=1e-12)
        if told.state:
            torch.testing.assert_close(told.state, expected.state, rtol=1e-10, atol=1e-12)
    assert any(outcome.told[rank].state for rank in left)
    return outcome


@pytest.mark.processes
def test_one_rank_after_the_other_is_killed() -> None:
    strikes = (
        Strike("kill", 1, 2, "backward", 2),
        Strike("kill", 0, 3, "update"),  # which keeps the store
        Strike("kill", 3, 5, "loss", 1),
    )
    outcome = survived(Job(4, 7, strikes), [2])
    found = outcome.told[2].recoveries
    assert [(each.lost, each.ranks, each.step) for each in found] == [
        ([1], [0, 2, 3], 2),
        ([0], [2, 3], 3),
        ([3], [2], 5),
    ]
    assert str(found[0]).startswith(
        "rank 1 lost; 3 ranks [0, 2, 3] on from step 2, from the copies of the ranks, after "
    )


@pytest.mark.processes
@pytest.mark.parametrize("how", ["stop", pytest.param("cut", marks=pytest.mark.matrix)])
def test_a_rank_that_hangs_or_is_cut_off(how: str) -> None:
    job = Job(3, 5, (Strike(how, 1, 2, "forward", 2),), timeout=5.0 if how == "stop" else 60.0)
    outcome = survived(job, [0, 1, 2] if how == "cut" else [0, 2])
    assert [each.lost for each in outcome.told[0].recoveries] == [[] if how == "cut" else [1]]
    if how == "stop":
        assert outcome.codes[1] == -9  # it must not go on by itself later


@pytest.mark.processes
def test_stages_that_are_given_move_to_other_ranks() -> None:
    strikes = Strike("kill", 2, 2, "update"), Strike("kill", 1, 5, "clip")
    outcome = survived(Job(3, 7, strikes, whole=False, layers=3, every=3), [0])
    # What is repeated after the first loss counts for the next copy.
    assert [each.step for each in outcome.told[0].recoveries] == [0, 3]


@pytest.mark.processes
def test_another_rank_reads_the_same_batches() -> None:
    strikes = (
        Strike("kill", 0, 1, "update"),
        Strike("kill", 1, 6, "forward", 1),
        Strike("kill", 2, 8, "update"),
    )
    survived(Job(4, 12, strikes, loads=True), [3])


class Parted:
    """The control plane of one part of a cut network, in which all have voted for each other."""

    generation = 0

    def __init__(self, process: int, part: list[int], dead: list[int]) -> None:
        self.process, self.numbers = process, [0, 1, 2, 3, 4]
        self.news = News(process, time.monotonic)
        self.news.gone = {each: LOST for each in self.numbers if each not in part}
        self.news.gone |= dict.fromkeys(dead, ENDED)
        self.news.votes = {each: Vote(each, 1, 1, part, dead, NOWHERE) for each in part}

    def vote(self, vote: Vote) -> None:
        self.news.votes[vote.process] = vote

    def end(self, process: int) -> None:
        """They are on other hosts."""

    def await_news(self, seconds: float) -> None:
        """There is none."""


@pytest.mark.parametrize(
    ("part", "dead", "goes_on"),
    [
        ([1, 3, 4], [], True),
        ([0, 2], [], False),
        ([0, 2], [1], True),  # a half, with the first of those that may live
        ([2, 3], [1], False),
        ([3], [0, 1, 2, 4], True),
    ],
)
def test_of_a_cut_network_the_part_with_the_majority_goes_on(
    part: list[int], dead: list[int], goes_on: bool
) -> None:
    plane: Any = Parted(part[0], part, dead)
    if goes_on:
        assert [vote.process for vote in elect(plane, [], lambda: NOWHERE, 1.0)] == part
        return
    with pytest.raises(LeftBehindError) as raised:
        elect(plane, [], lambda: NOWHERE, 1.0)
    others = [each for each in plane.numbers if each not in part]
    assert str(raised.value).startswith(
        f"of the ranks [0, 1, 2, 3, 4], only {part} can reach each other, and {others} may live: "
        "without a majority they must not go on, so they end"
    )


BOTH = (Strike("kill", 1, 3, "between"), Strike("kill", 2, 3, "between"))
"""A rank, and the one that has the copy of its state."""


@pytest.mark.processes
def test_too_many_at_once_go_on_from_the_latest_checkpoint(tmp_path: Path) -> None:
    job = Job(4, 6, BOTH, folder=str(tmp_path), saves=(1,))
    outcome = survived(job, [0, 3], without=[2, 3], since=4)
    (found,) = outcome.told[0].recoveries
    assert (found.lost, found.step, found.checkpoint) == ([1, 2], 2, tmp_path / "000001-step-2")


@pytest.mark.processes
@pytest.mark.matrix
def test_too_many_at_once_without_a_checkpoint() -> None:
    outcome = run(Job(4, 5, BOTH))
    assert {told.error for told in outcome.told.values()} == {
        "LeftBehindError: the copies of the states of [1, 2] are lost, too, and elastic() has no "
        "folder with checkpoints; restart all ranks"
    }


# What is refused.


def pipeline(**options: object) -> tl.Pipeline:
    usual = {"microbatches": 2, "ranks": 4, "loss_fn": nn.functional.mse_loss, "elastic": True}
    stages = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)]
    return tl.Pipeline(stages, **(usual | options))  # type: ignore[arg-type]


def test_what_elastic_refuses() -> None:
    with pytest.raises(UseError, match="make the pipeline with elastic=True"):
        enter(pipeline(elastic=False))
    with pytest.raises(UseError, match=r"pass elastic\(\) the optimizers"):
        enter(pipeline(), [])
    with pytest.raises(UseError, match="cannot be made with prepare, which"):
        enter(pipeline(prepare=lambda module, stage: module))


def refusals(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What calls raise that cannot be repeated."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    found: list[str] = []
    with pytest.raises(UseError) as meshed:
        enter(pipeline(ranks=None, mesh=mesh))
    pipe = pipeline(ranks=None)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, y = torch.ones(4, 2), torch.ones(4, 1)
    with pipe.elastic(optimizer):
        calls = (
            lambda: pipe.step(x),
            lambda: pipe.step(x, target=y, scaler=pipe.scaler()),
            lambda: pipe.accumulate(),
            lambda: pipe.load("folder"),
            lambda: optimizer.step(lambda: 0.0),
        )
        for call in calls:
            with pytest.raises(UseError) as refused:
                call()
            found.append(str(refused.value))
        pipe.step(x, target=y)
        optimizer.step()
        with pytest.raises(UseError) as kept:
            pipe.step(x, target=y)
    return [*found, str(kept.value), str(meshed.value)]


@pytest.mark.processes
def test_calls_that_elastic_refuses(workers: Workers) -> None:
    first, *others = workers.run(refusals, ranks=4)
    assert others == [first] * 3
    assert [text.partition(": ")[0][:66] for text in first] == [
        "pass every rank of an elastic pipeline the whole batch with its ta",
        "an elastic pipeline cannot repeat what a GradScaler does; train in",
        "accumulate() cannot be repeated after a loss; call it outside of t",
        "load() cannot be repeated after a loss; call it outside of the blo",
        "an elastic pipeline cannot repeat a step of an optimizer by a clos",
        "an elastic pipeline repeats steps from a copy of the state, which ",
        "an elastic pipeline cannot be made with a mesh or replicas (mesh, ",
    ]


def no_room(rank: int, group: dist.ProcessGroup) -> str:
    elastic.free_memory = lambda: 100
    try:
        with pytest.raises(UseError) as refused:
            enter(pipeline(ranks=None))
    finally:
        elastic.free_memory = free_memory
    return str(refused.value)


@pytest.mark.processes
def test_memory_that_is_not_there_is_said_before(workers: Workers) -> None:
    first, *others = workers.run(no_room, ranks=4)
    assert others == [first] * 3
    assert first.startswith(
        "elastic() keeps 4 copies of the state of each rank in host memory: host "
    )
    assert first.endswith(" needs 1008 B for them, and has 100 B")


def enter(pipe: tl.Pipeline, optimizers: list[torch.optim.Optimizer] | None = None) -> None:
    found = [torch.optim.SGD(pipe.parameters())] if optimizers is None else optimizers
    with pipe.elastic(found):
        pass


def test_ranks_in_one_process_have_nobody_to_lose() -> None:
    pipe = pipeline()
    with pipe.elastic(torch.optim.SGD(pipe.parameters())) as same:
        assert same is pipe
        assert pipe.step(torch.ones(4, 2), target=torch.ones(4, 1)) > 0
