"""A few of the faults, and what is noticed of them; ``make faults`` runs the whole table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.faults import network
from tests.faults.case import FAULTS, SCHEDULES, TIMEOUT, WRAPPERS, Case, draw, sample, table
from tests.faults.judge import judge, run
from tests.faults.messages import Answer, Struck
from tests.faults.model import LUCK
from tests.faults.pool import Job, Report

# Tests run on machines that are busy: here, a rank must only know before the timeout can tell it.
LIMIT = TIMEOUT - 0.5


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", sample(), ids=lambda case: case.name)
def test_nothing_hangs_and_every_rank_names_the_cause(case: Case) -> None:
    verdict = run(case, limit=LIMIT)
    assert not verdict.wrong, f"{case}\n{verdict}"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["network-reset"])
def test_faults_of_the_network(name: str) -> None:
    try:
        verdict = network.run(name, limit=LIMIT)
    except network.Unable as error:
        pytest.skip(str(error))
    assert not verdict.wrong, f"{name}\n{verdict}"


@pytest.mark.processes
@pytest.mark.slow
def test_two_hosts_with_ipv6_only() -> None:
    case = Case.of("kill-1f1b-4-none-steady")
    try:
        with network.hosts(network.V6_ADDRESSES) as hosts, Job(case, hosts.places(True)) as job:
            job.build()
            job.tell("face", case)
            others = [rank for rank in range(case.ranks) if rank != case.victim]
            answers = job.listen(others, 30.0)
    except network.Unable as error:
        pytest.skip(str(error))
    known = {rank: (answer.kind, answer.peer) for rank, answer in answers.items()}
    assert known == dict.fromkeys(others, ("LostRankError", case.victim))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("schedule", "ranks", "call", "victim", "how"),
    [
        ("1f1b", 6, "load", 4, "sleeps"),
        ("1f1b", 6, "load", 1, "loops"),
        ("1f1b", 6, "save", 4, "sleeps"),
        ("zbv", 8, "save", 2, "loops"),
    ],
)
def test_a_rank_that_hangs_in_a_save_or_load(
    tmp_path: Path, schedule: str, ranks: int, call: str, victim: int, how: str
) -> None:
    with Job(Case.of(f"hang-{schedule}-{ranks}-none-steady")) as job:
        job.build()
        if call == "load":
            job.ask("checkpoint", "save", str(tmp_path), victim, "not")
        job.tell("checkpoint", call, str(tmp_path), victim, how)
        others = [rank for rank in range(ranks) if rank != victim]
        answers = job.listen(others, 6 * TIMEOUT)
    known = {rank: (answer.kind, answer.peer) for rank, answer in answers.items()}
    assert known == dict.fromkeys(others, ("StallError", victim)), answers[others[0]].text
    assert f"rank {victim}: is in {call}() for " in answers[others[0]].text


LOST = Answer(10.2, "LostRankError", ours=True, text="rank 0 has lost rank 4", peer=4)
STAGE = Answer(
    10.1,
    "StageError",
    ours=True,
    text=f"rank 4, stage 4, micro-batch 1 (4F1): RuntimeError: {LUCK}",
    where=(4, 4, 1, "4F1"),
    recoverable="step",
)
HEALTHY = Answer(9.0, numbers=(1.0, 2.0))


def right(case: Case, answer: Answer) -> Report:
    """What is seen if all goes well."""
    ranks = [rank for rank in range(case.ranks) if rank != case.victim or case.what.answers]
    report = Report(Struck(10.0, 4), dict.fromkeys(ranks, answer))
    report.healthy = dict.fromkeys(range(case.ranks), HEALTHY)
    if case.what.goes_on:
        report.resumed = dict(report.healthy)
    return report


def befalls_rank_4(fault: str) -> Case:
    choices = product(SCHEDULES, ("warmup", "steady", "eval"))
    cases = (Case(fault, schedule, 6, "none", phase) for schedule, phase in choices)
    return next(case for case in cases if case.victim == 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda report: report.answers.pop(0), "rank 0 hangs"),
        (lambda report: _change(report, at=13.0), "knew 3.0 s after the detection"),
        (lambda report: _change(report, peer=3), "rank 0 does not name rank 4"),
        (lambda report: _change(report, text="rank 0 has lost rank 44"), "rank 0 does not name"),
        (lambda report: _change(report, ours=False), "rank 0 raised no error of ours"),
        (lambda report: _change(report, recoverable="step"), "says 'step', with rank 4 gone"),
        (lambda report: report.left.append(0), "rank 0 had to be killed"),
        (lambda report: setattr(report, "struck", None), "the fault never came"),
    ],
)
def test_what_is_wrong_about_a_lost_rank(change: Callable[[Report], Any], text: str) -> None:
    case = befalls_rank_4("kill")
    report = right(case, LOST)
    assert not judge(case, report).wrong
    change(report)
    assert text in str(judge(case, report))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda report: _change(report, where=(4, 4, 2, "4F2")), "the ranks disagree on where"),
        (lambda report: _change(report, recoverable="restart"), "disagree on how to go on"),
        (lambda report: _change(report, text="rank 4"), "rank 0 does not name rank 4"),
        (lambda report: report.resumed.pop(0), "rank 0 hangs in the next step"),
        (lambda report: report.resumed.update({0: LOST}), "rank 0 raised in the next step"),
        (
            lambda report: report.resumed.update({0: replace(HEALTHY, numbers=(1.0, 2.1))}),
            "rank 0: loss and norm (1.0, 2.1), not (1.0, 2.0)",
        ),
    ],
)
def test_what_is_wrong_about_an_exception(change: Callable[[Report], Any], text: str) -> None:
    case = befalls_rank_4("error")
    report = right(case, STAGE)
    assert not judge(case, report).wrong
    change(report)
    assert text in str(judge(case, report))


def _change(report: Report, **changes: Any) -> None:
    report.answers[0] = replace(report.answers[0], **changes)


def test_the_table_has_everything() -> None:
    cases = list(table())
    assert {case.fault for case in cases} == set(FAULTS)
    assert {(case.wrapper, case.ranks) for case in cases} == {
        (wrapper, ranks) for wrapper, sizes in WRAPPERS.items() for ranks in sizes
    }
    assert len({case.name for case in cases}) == len(cases)
    assert all(Case.of(case.name) == case and case.victim < case.ranks for case in cases)


def test_the_same_seed_draws_the_same_faults() -> None:
    first, second = ([draw(rng) for _ in range(50)] for rng in (Random(7), Random(7)))
    assert first == second
    assert len(set(first)) > 25
    assert draw(Random(3), ("1f1b", 6, "none")).setup == ("1f1b", 6, "none")


@pytest.mark.parametrize("name", ["kill", "kill-1f1b-6-none", "kill-1f1b-5-none-steady", ""])
def test_names_of_no_case(name: str) -> None:
    with pytest.raises(ValueError, match="a case is called kill-1f1b-6-none-steady or the like"):
        Case.of(name)
