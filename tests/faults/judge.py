"""What was right and what was wrong about the answers to a fault."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.faults.case import Case
from tests.faults.messages import Answer, Struck
from tests.faults.model import LUCK
from tests.faults.pool import Report, started, trial

LIMIT = 2.0
"""How much later than the detection the last rank may know, in seconds."""

UNEVEN = "the latest step has ended on some ranks only"
"""What every rank may say instead of going on: nobody can know whether a last message arrived."""

OWN = {"interrupt": "KeyboardInterrupt", "quit": "SystemExit"}
"""What the rank itself raises."""


@dataclass
class Verdict:
    """What was wrong, if anything, and when the last rank knew."""

    wrong: list[str] = field(default_factory=list)
    delay: float | None = None
    """Since the detection; None if there was nothing to know, or some rank never knew."""
    hangs: bool = False
    """Whether some rank never knew."""
    resumed: bool = False
    """Whether training went on."""

    def __str__(self) -> str:
        return "\n".join(f"  {line}" for line in self.wrong)


def run(case: Case, *, limit: float = LIMIT, quiet: bool = True) -> Verdict:
    """Start processes for a case, and judge what they do."""
    try:
        with started(case, quiet=quiet) as job:
            report = trial(job, case)
            if not report.silent:
                report.left = job.leave()
    except RuntimeError as error:
        return Verdict([f"no fault yet, and already: {error}"])
    return judge(case, report, limit)


def judge(case: Case, report: Report, limit: float = LIMIT) -> Verdict:
    """Compare what each rank said, and when, with what the table demands."""
    verdict = Verdict(hangs=bool(report.silent), resumed=bool(report.resumed))
    if not case.what.act:
        verdict.wrong += _undisturbed(report, case.ranks)
    elif report.struck is None:
        verdict.wrong.append("the fault never came")
    else:
        verdict.wrong += _raised(case, report, report.struck, limit)
        verdict.delay = _delay(case, report, report.struck)
        if verdict.delay is not None and verdict.delay > limit:
            verdict.wrong.append(f"the last rank knew {verdict.delay:.1f} s after the detection")
    if case.what.act and case.what.goes_on and case.when.call != "build":
        verdict.wrong += went_on(case.ranks, report, wrapped=case.wrapper != "none")
    verdict.wrong += [f"rank {rank} had to be killed in the end" for rank in report.left]
    return verdict


def _delay(case: Case, report: Report, struck: Struck) -> float | None:
    """How long after the detection the last rank knew."""
    others = [rank for rank in range(case.ranks) if rank != case.victim]
    if not all(rank in report.answers and report.answers[rank].kind for rank in others):
        return None
    # Those who only now make their call cannot know before.
    begun = struck.at + case.what.detection + case.when.late
    return max(0.0, *(report.answers[rank].at - begun for rank in others))


def _undisturbed(report: Report, ranks: int) -> Iterator[str]:
    for rank in range(ranks):
        answer = report.answers.get(rank)
        if answer is None:
            yield f"rank {rank} hangs, though no rank is gone"
        elif answer.kind:
            yield f"rank {rank} raised, though no rank is gone: {answer}"


def _raised(case: Case, report: Report, struck: Struck, limit: float) -> Iterator[str]:
    """What is wrong about the errors of the ranks."""
    answers = report.answers | report.awoken
    wheres = {answer.where for answer in answers.values() if answer.where}
    if len(wheres) > 1:
        yield f"the ranks disagree on where it was: {sorted(map(str, wheres))}"
    for rank in range(case.ranks):
        answer = answers.get(rank)
        if rank == case.victim and not case.what.answers:
            continue
        if answer is None:
            yield f"rank {rank} hangs"
        elif rank == case.victim and case.fault in OWN:
            if answer.kind != OWN[case.fault]:
                yield f"rank {rank} raised no {OWN[case.fault]}, but {answer}"
            if (delay := answer.at - struck.at) > limit:
                yield f"rank {rank} heard of its own {answer.kind} after {delay:.1f} s"
        elif rank in report.awoken and not answer.kind:
            pass  # all that it waited for had arrived: it gets the error in its next call
        elif not answer.ours:
            yield f"rank {rank} raised no error of ours: {answer}"
        elif not _names(case, struck, answer):
            yield f"rank {rank} does not name rank {case.victim}: {answer}"
        elif not case.what.goes_on and answer.recoverable not in (None, "restart"):
            yield f"rank {rank} says {answer.recoverable!r}, with rank {case.victim} gone"


def _names(case: Case, struck: Struck, answer: Answer) -> bool:
    """Whether an error has the right cause: the rank in the world, or in its replica's pipeline."""
    replica, place = case.victim % case.beside, case.victim // case.beside
    if answer.peer not in (None, case.victim, place):
        return False
    if case.what.act == "error":
        stage = struck.stage
        return (
            answer.where is not None
            and answer.where[0] in (case.victim, place)
            and answer.where[1] == stage
            and answer.where[2] is not None
            and f"stage {stage}, micro-batch {answer.where[2]} ({answer.where[3]})" in answer.text
            and LUCK in answer.text
        )
    if re.search(rf"\brank {case.victim}\b", answer.text):
        return True
    told = rf"\b(replica|tensor-parallel rank) {replica}\b.*\brank {place}\b"
    return case.beside > 1 and bool(re.search(told, answer.text, re.DOTALL))


def went_on(ranks: int, report: Report, *, wrapped: bool = False) -> Iterator[str]:
    """What is wrong about the step after a fault that every process has survived.

    Wrapped stages may need new processes: a collective that was left cannot be repeated.
    """
    says = {
        rank: answer.recoverable
        for rank, answer in (report.answers | report.awoken).items()
        if answer.ours
    }
    if len(set(says.values())) > 1:
        yield f"the ranks disagree on how to go on: {says}"
    elif not set(says.values()) & {"step", "reconnect"} and not wrapped:
        yield f"nobody says how to go on, with every process alive: recoverable = {says}"
    ended = all(UNEVEN in answer.text for answer in report.resumed.values())
    for rank in range(ranks) if report.resumed else ():
        answer, before = report.resumed.get(rank), report.healthy[rank]
        if answer is None:
            yield f"rank {rank} hangs in the next step"
        elif answer.kind and not (ended and UNEVEN in answer.text):
            yield f"rank {rank} raised in the next step: {answer}"
        elif not all(map(math.isclose, answer.numbers, before.numbers)):
            yield f"rank {rank}: loss and norm {answer.numbers}, not {before.numbers}"
