"""The same calls to torch's stages and schedules and to ours: same answers, same errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat.peer import SINCE_2_12
from tests.compat.programs import CPU, OURS, TORCHS, schedules, stages
from tests.plan import peer
from tests.plan.peer import StandIn
from tests.workers import Workers

KINDS = (AssertionError, RuntimeError, TypeError, ValueError)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or which kinds of error it raises, with the first line of its text."""
    try:
        return call()
    except KINDS as error:
        return sorted(k.__name__ for k in KINDS if isinstance(error, k)), str(error).strip()


class Calls:
    """Calls to a stage and schedules on one rank, by name."""

    def __init__(self, group: dist.ProcessGroup, source: str, folder: str) -> None:
        self.s, self.t, self.group = schedules(source), stages(source), group
        torch.manual_seed(0)
        self.module = nn.Linear(4, 4)
        self.file = f"{folder}/order.csv"

    def stage(self, index: int = 0, count: int = 1) -> Any:
        return self.t.PipelineStage(self.module, index, count, CPU, group=self.group)

    def runtime(self) -> Any:
        return self.s._PipelineScheduleRuntime([self.stage()], 2, loss_fn=nn.functional.mse_loss)

    def order(self, text: str) -> dict[int, list[Any]]:
        return {
            0: [self.s._Action.from_str(word) if word != "." else None for word in text.split()]
        }

    def prepared(self, text: str, form: str = "compute_only") -> Any:
        schedule = self.runtime()
        schedule._prepare_schedule_with_comms(self.order(text), format=form)
        return {r: list(map(str, row)) for r, row in schedule.pipeline_order_with_comms.items()}

    def dumped(self, form: str) -> str:
        schedule = self.runtime()
        schedule._prepare_schedule_with_comms(self.order("0F0 . 0F1 0I0 0W0 0B1"))
        schedule.pipeline_order = self.order("0F0 . 0F1 0I0 0W0 0B1")
        schedule._dump_csv(self.file, form)
        return Path(self.file).read_text()

    def loaded(self, form: str) -> Any:
        self.dumped(form)
        schedule = self.runtime()
        schedule._load_csv(self.file, form)
        return {r: list(map(str, row)) for r, row in schedule.pipeline_order_with_comms.items()}

    def without_gradient(self) -> Any:
        with torch.no_grad():
            return self.runtime().step(torch.ones(4, 4))

    def forward_only(self) -> Any:
        schedule = self.s._ScheduleForwardOnly(self.stage(), 2)
        return schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))

    def all(self) -> dict[str, Any]:
        calls: dict[str, Callable[[], Any]] = {
            "lowered": lambda: self.prepared("0F0 . 0F1 0B0 0B1"),
            "as written": lambda: self.prepared("0F0 0F1 0I0 0I1 0W0 0W1", "compute_comms"),
            "an action is missing": lambda: self.prepared("0F0", "compute_comms"),
            "a None": lambda: self.prepared("0F0 . 0F1 0B0 0B1", "compute_comms"),
            "a message": lambda: self.prepared("0F0 0F1 0SEND_F0 0B0 0B1"),
            "dump computations": lambda: self.dumped("compute_only"),
            "dump all": lambda: self.dumped("compute_comms"),
            "load computations": lambda: self.loaded("compute_only"),
            "load all": lambda: self.loaded("compute_comms"),
            "a backward of some kind": lambda: self.stage().backward_maybe_with_nosync("x", {}),
            "no backward, no W": lambda: self.stage().backward_weight_one_chunk(bwd_chunk_id=0),
            "W before I": lambda: self._with_backward().backward_weight_one_chunk(bwd_chunk_id=0),
            "no gradients": self.without_gradient,
            "a target, forward only": self.forward_only,
        }
        return {name: outcome(call) for name, call in calls.items()}

    def _with_backward(self) -> Any:
        stage = self.stage()
        stage.has_backward = True
        return stage


def _both(rank: int, group: dist.ProcessGroup, folder: str) -> list[dict[str, Any]]:
    return [Calls(group, source, folder).all() for source in (OURS, TORCHS)]


@SINCE_2_12  # before, infos have fewer fields
@pytest.mark.processes
def test_same_answers_and_errors(workers: Workers, tmp_path: Path) -> None:
    ((ours, theirs),) = workers.run(_both, str(tmp_path), ranks=1)
    for name, expected in theirs.items():
        found = ours[name]
        if isinstance(expected, tuple) and isinstance(expected[0], list) and expected[0][:1]:
            kinds, text = expected
            # Ours are ValueErrors in any case, so that TaktlineError catches them.
            if all(isinstance(kind, str) for kind in kinds):
                assert set(kinds) <= set(found[0]), (name, found)
                assert " ".join(found[1].split()) == " ".join(text.split()), name
                continue
        assert found == expected, name


@pytest.mark.parametrize(
    ("name", "per_rank"),
    [
        ("LoopedBFS", (1, 2, 3)),
        ("Interleaved1F1B", (1, 2, 3)),
        ("InterleavedZeroBubble", (1, 2, 3)),
        ("ZBVZeroBubble", (2,)),
        ("DualPipeV", (2,)),
    ],
)
def test_orders_with_what_they_leave_empty(name: str, per_rank: tuple[int, ...]) -> None:
    cls = schedules().get_schedule_class(name)
    count = 0
    for ranks in (1, 2, 3, 4, 6):
        for microbatches in (1, 2, 3, 4, 8, 10, 12):
            for each in per_rank:
                try:
                    theirs = peer.make(name, 0, ranks, microbatches, each)
                except ValueError:
                    continue
                mine = [StandIn(rank, ranks * each, 0, ranks) for rank in range(each)]
                ours = cls(mine, microbatches)
                for order in ("pipeline_order", "pipeline_order_with_comms"):
                    assert texts(getattr(ours, order)) == texts(getattr(theirs, order))
                assert ours.stage_index_to_group_rank == theirs.stage_index_to_group_rank
                count += 1
    assert count >= 15


def texts(order: dict[int, list[Any]]) -> dict[int, list[str]]:
    return {rank: ["" if a is None else str(a) for a in row] for rank, row in order.items()}


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_calls_to_stages(name: str) -> None:
    """Stages that only note their calls are called in torch's order."""
    for ranks in (1, 2, 4):
        for microbatches in (4, 6):
            expected = peer.recorded_order(name, ranks, microbatches)
            assert expected is not None
            for rank in range(ranks):
                stage = StandIn(rank, ranks, rank, ranks)
                schedule = schedules().get_schedule_class(name)(stage, microbatches)
                schedule._has_backward = True
                schedule._initialize_stage = lambda *args, **kwargs: None
                schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
                assert stage.calls == expected[rank]


def test_classes_have_the_bases_of_torch() -> None:
    ours, theirs = schedules(), schedules(TORCHS)
    bases = ("_PipelineSchedule", "PipelineScheduleSingle", "PipelineScheduleMulti")
    for name in dir(theirs):
        if not name.lstrip("_").startswith("Schedule"):
            continue
        for base in (*bases, "_PipelineScheduleRuntime", "ScheduleZBVZeroBubble"):
            expected = issubclass(getattr(theirs, name), getattr(theirs, base))
            assert issubclass(getattr(ours, name), getattr(ours, base)) is expected, (name, base)
    for name in ("PipelineStage", "_PipelineStage"):
        assert issubclass(getattr(stages(), name), stages()._PipelineStageBase)


@pytest.mark.parametrize("name", ["1f1b", "GPIPE", "zbvZeroBubble", "PipelineScheduleMulti"])
def test_names_of_schedules(name: str) -> None:
    ours, theirs = (schedules(source).get_schedule_class(name) for source in (OURS, TORCHS))
    assert ours.__name__ == theirs.__name__
    assert ours is getattr(schedules(), ours.__name__)
    with pytest.raises(ValueError, match="Unknown schedule name 'no'"):
        schedules().get_schedule_class("no")
