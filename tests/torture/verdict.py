"""Reports what is wrong with a case, if anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import taktline as tl
from taktline.errors import DeadlockError
from tests.torture.case import Call, Case
from tests.torture.run import Record, run_local, run_plain, run_rank
from tests.workers import Workers, WorkersFailed, WorkersLost

KINDS = {"forward": "F", "loss": "F", "backward": "BI", "weight": "W"}
"""The actions in which a fault shows."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    KINDS: ClassVar = ("hangs", "wrong gradients", "wrong errors", "other")

    kind: str = ""
    story: str = ""

    @property
    def wrong(self) -> bool:
        return bool(self.kind)

    def __str__(self) -> str:
        return f"  {self.kind}: {self.story}"


def judge(workers: Workers, case: Case, timeout: float) -> Verdict:
    """Run a case over its transport; whoever gives no answer in time hangs."""
    over_gloo = case.transport == "gloo"
    try:
        results: Any = workers.run(
            run_rank if over_gloo else run_local,
            case,
            ranks=case.plan.ranks if over_gloo else 1,
            timeout=timeout,
        )
    except WorkersLost as lost:
        return Verdict("hangs" if lost.silent and not lost.died else "other", str(lost))
    except WorkersFailed as failed:
        deadlock = any(isinstance(e, DeadlockError) for e in failed.errors.values())
        return Verdict("hangs" if deadlock else "other", str(failed))
    return complaint(case, results if over_gloo else results[0])


def complaint(case: Case, ranks: Sequence[Sequence[Record]]) -> Verdict:
    """The first thing that is wrong with what the ranks gave."""
    for number, (call, plain) in enumerate(zip(case.calls, run_plain(case), strict=True)):
        records = [rank[number] for rank in ranks]
        kind, found = "wrong errors", _wrong_errors(case, call, records)
        if not found:
            kind, found = "wrong gradients", _wrong_gradients(case, call, records, plain)
        if not found and not call.faults:
            kind, found = "other", _wrong_results(case, call, records, plain)
        if found:
            return Verdict(kind, f"call {number}, {call}: {'; '.join(found)}")
    return Verdict()


def _wrong_errors(case: Case, call: Call, records: Sequence[Record]) -> list[str]:
    errors = [record.error for record in records]
    if not call.faults:
        return [f"rank {r} raised {e!r}" for r, e in enumerate(errors) if e is not None]
    if any(not isinstance(error, tl.StageError) for error in errors):
        return [f"rank {r}: no StageError, but {e!r}" for r, e in enumerate(errors)]
    if len({str(error) for error in errors}) > 1:
        return [f"rank {r} raised {e!r}" for r, e in enumerate(errors)]
    error = errors[0]
    assert isinstance(error, tl.StageError)
    for fault in call.faults:
        where = (case.plan.placement.rank_of[fault.stage], fault.stage, fault.microbatch)
        actions = [f"{fault.stage}{kind}{fault.microbatch}" for kind in KINDS[fault.where]]
        text = f"Tripped: {fault}{fault.words}"
        told = (error.rank, error.stage, error.microbatch)
        if told == where and error.action in actions and str(error).endswith(text):
            return []
    return [f"the error names none of the faults: {error}"]


def _wrong_gradients(case: Case, call: Call, records: Sequence[Record], plain: Record) -> list[str]:
    if call.faults and call.what == "step":
        # Those of a failed step are not worth anything.
        return []
    gradients = {name: g for record in records for name, g in record.gradients.items()}
    if gradients.keys() != plain.gradients.keys():
        names = sorted(gradients.keys() ^ plain.gradients.keys())
        return [f"only one of both has gradients of {', '.join(names)}"]
    return [name for name in gradients if not _same(case, gradients[name], plain.gradients[name])]


def _wrong_results(case: Case, call: Call, records: Sequence[Record], plain: Record) -> list[str]:
    texts = []
    owner = case.plan.placement.rank_of[-1]
    for rank, record in enumerate(records):
        told = case.shares or rank == owner
        if told and not _same(case, record.losses, plain.losses):
            texts.append(f"wrong losses on rank {rank}: {record.losses}, not {plain.losses}")
        if case.shares and not _same(case, record.aux_losses, plain.aux_losses):
            texts.append(f"wrong added losses on rank {rank}")
        gives = rank == owner and case.outputs
        if not _same(case, record.output, plain.output if gives else None):
            texts.append(f"wrong output on rank {rank}")
    return texts


def _same(case: Case, one: Any, two: Any) -> bool:
    # Not exact, it allows for sums in another order, and is still far from a missing summand.
    rtol, atol = (0.0, 0.0) if case.exact else (1e-4, 1e-6)
    try:
        torch.testing.assert_close(one, two, rtol=rtol, atol=atol)
    except AssertionError:
        return False
    return True
