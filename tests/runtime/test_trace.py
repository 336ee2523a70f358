"""Measured timelines: complete, in order, true to dependencies, and without effect on results."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import taktline as tl
from taktline.errors import MismatchError, ScheduleError, StageError
from taktline.plan import Kind, Level, Timeline, build, lower, read_timeline, write_timeline
from taktline.plan.deps import needs
from taktline.runtime.program import Program
from taktline.runtime.trace import _arrivals, align
from taktline.transport import local, transport_of
from taktline.transport.base import Channel, Frame, Post, Transport
from tests.runtime.scenarios import (
    SCHEDULES,
    Case,
    check_case,
    run_case,
    run_case_locally,
)
from tests.workers import Workers

CALLS = (("step", 8), ("step", 8), ("eval", 8), ("step", 12))


def check(timelines: Sequence[Timeline], case: Case, error: float) -> None:
    """All that must hold of what was measured; times themselves are nobody's business."""
    assert len(timelines) == len(case.calls)
    for timeline, (call, _) in zip(timelines, case.calls, strict=True):
        plan = timeline.plan
        assert timeline.measured
        assert timeline.costs.unit == "ms"
        assert plan.level is Level.LOWERED
        kinds = (Kind.F,) if call == "eval" else (Kind.F, Kind.B, Kind.I, Kind.W)
        for rank in range(plan.ranks):
            planned = case.plan.rows_of(rank)
            expected = [
                str(planned.leaf(row)) for row in range(len(planned)) if planned.kind[row] in kinds
            ]
            spans = list(timeline.spans(rank))
            assert [str(s.action) for s in spans if s.action.kind.is_compute] == expected
            assert all(span.start <= span.end for span in spans)
            assert all(a.end <= b.start for a, b in pairwise(spans))
        assert timeline.start.min() >= 0
        own = needs(plan).own
        own[own < 0] = np.flatnonzero(own < 0)
        assert (timeline.start >= timeline.start[own]).all()
        sources, targets = timeline.messages()
        assert len(sources) or plan.ranks == 1
        assert (timeline.start[targets] >= timeline.end[sources] - error).all()
        assert 0 <= timeline.bubble() < 1
        assert timeline.critical_path()


def cases() -> list[Case]:
    return [
        Case(schedule, 2, per_rank[-1], 4, "mlp", CALLS) for schedule, per_rank in SCHEDULES.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=str)
def test_local(case: Case) -> None:
    ranks = run_case_locally(case, traced=True)
    for rank in ranks:
        assert rank.clock_error == 0  # local ranks share a clock
        check(rank.timelines, case, 0)
    check_case(ranks, case)


@pytest.mark.processes
@pytest.mark.parametrize("case", cases(), ids=str)
def test_gloo(workers: Workers, case: Case) -> None:
    first, second = workers.run(run_case, case, True)
    check(first.timelines, case, first.clock_error)
    check_case([first, second], case)
    for here, there in zip(first.timelines, second.timelines, strict=True):
        assert here.plan == there.plan
        assert (here.start == there.start).all()
        assert (here.end == there.end).all()
        assert here.costs == there.costs


def test_one_rank() -> None:
    case = Case("ScheduleInterleaved1F1B", 1, 3, 2, "mlp", CALLS)
    found = run_case(0, None, case, traced=True)
    check(found.timelines, case, found.clock_error)


def small(rank: int, module: nn.Module | None = None, **options: Any) -> tl.Schedule1F1B:
    stage = tl.PipelineStage(module or nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    return tl.Schedule1F1B(stage, 2, nn.functional.mse_loss, **options)


def alone() -> tl.ScheduleGPipe:
    stage = tl.PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    return tl.ScheduleGPipe(stage, 2, nn.functional.mse_loss)


def step(schedule: Any) -> None:
    schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))


def test_a_trace_has_the_attributes_of_its_last_timeline() -> None:
    schedule = alone()
    with schedule.trace() as timeline:
        step(schedule)
    assert timeline.bubble() == timeline.timelines[-1].bubble()
    assert timeline.makespan == timeline.timeline.makespan
    with pytest.raises(AttributeError, match="nonsense"):
        _ = timeline.nonsense


def test_a_measured_timeline_is_drawn_written_and_compared(tmp_path: Path) -> None:
    timeline = run_case_locally(cases()[1], traced=True)[0].timelines[1]
    write_timeline(timeline, tmp_path / "measured.json")
    again = read_timeline(tmp_path / "measured.json")
    assert again.measured
    assert again.plan == timeline.plan
    assert again.costs == timeline.costs
    assert (again.start == timeline.start).all()
    assert (again.end == timeline.end).all()
    predicted = tl.simulate(timeline.plan, timeline.costs)
    assert predicted.name != again.name
    assert again.to_text(100).startswith("1f1b, measured: makespan ")
    assert again.to_svg() == timeline.to_svg()
    assert "1f1b, measured" in predicted.to_html(again)
    names = {event["name"] for event in json.loads(again.to_trace())["traceEvents"]}
    assert {"0F0", "1B3", "activation", "gradient"} <= names


class Slow(nn.Linear):
    """Takes its time."""

    def forward(self, input: Tensor) -> Tensor:
        time.sleep(0.1)
        return super().forward(input)


def run_slow(rank: int, group: dist.ProcessGroup) -> Timeline:
    module = Slow(4, 4) if rank == 0 else nn.Linear(4, 4)
    stage = tl.PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = tl.Schedule1F1B(stage, 2, nn.functional.mse_loss)
    step(schedule)
    with schedule.trace() as trace:
        step(schedule)
    return trace.timeline


@pytest.mark.processes
def test_waiting_does_not_count_as_computing(workers: Workers) -> None:
    """Rank 1 has to wait for each slow forward of rank 0, and only that takes long."""
    timeline = workers.run(run_slow)[0]
    spans = {str(s.action): s for rank in (0, 1) for s in timeline.spans(rank)}
    for m in (0, 1):
        assert spans[f"0F{m}"].end - spans[f"0F{m}"].start >= 0.1e3
        assert spans[f"1F{m}"].start >= spans[f"0F{m}"].end
    # It began to wait long before that.
    assert spans["1F0"].start >= 0.1e3


def test_nothing_is_recorded_before_and_after() -> None:
    def main(rank: int) -> list[int]:
        schedule = small(rank)
        step(schedule)
        with schedule.trace() as first:
            step(schedule)
            step(schedule)
            inside = len(first.timelines)
        step(schedule)
        with schedule.trace() as second:
            pass
        with schedule.trace() as third:
            step(schedule)
        return [inside, *(len(trace.timelines) for trace in (first, second, third))]

    assert local.run(main, 2) == [[0, 2, 0, 1]] * 2


def test_off_costs_nothing_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    wraps: list[object] = []
    plain = Program.run

    def run(self: Program, observe: Any = None) -> Any:
        wraps.append(observe)
        return plain(self, observe)

    monkeypatch.setattr(Program, "run", run)
    schedule = alone()
    step(schedule)
    with schedule.trace():
        step(schedule)
    step(schedule)
    assert [wrap is None for wrap in wraps] == [True, False, True]


class Moody(nn.Linear):
    """Fails when it is told to."""

    fails = False

    def forward(self, input: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("not today")
        return super().forward(input)


def test_an_error_that_leaves_the_block() -> None:
    def main(rank: int) -> int:
        schedule = small(rank)
        traces: list[tl.Trace] = []

        def fail() -> None:
            with schedule.trace() as trace:
                traces.append(trace)
                step(schedule)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert traces[0].timelines == []
        with schedule.trace() as trace:
            step(schedule)
        return len(trace.timelines)

    assert local.run(main, 2) == [1, 1]


@pytest.mark.parametrize("when", ["learning", "known"])
def test_a_step_that_failed_is_left_out(when: str) -> None:
    def main(rank: int) -> int:
        schedule = small(rank, module := Moody(4, 4))
        with schedule.trace() as trace:
            if when == "known":
                step(schedule)
                step(schedule)
            module.fails = rank == 0
            with pytest.raises(StageError):
                step(schedule)
            module.fails = False
            step(schedule)
        return len(trace.timelines)

    assert local.run(main, 2) == [1 + 2 * (when == "known")] * 2


def test_a_trace_that_is_not_on_every_rank() -> None:
    def main(rank: int) -> str:
        schedule = small(rank)
        block = schedule.trace() if rank == 0 else nullcontext()
        with pytest.raises(MismatchError) as caught, block:
            step(schedule)
        step(schedule)
        return str(caught.value)

    for text in local.run(main, 2):
        assert text == (
            "the ranks disagree on the use of trace(): True on rank 0; False on rank 1; "
            "enter and leave it on every rank at the same place"
        )


def test_a_trace_in_a_trace() -> None:
    schedule = small(0)
    with schedule.trace() as trace:
        with pytest.raises(ScheduleError, match="traced already"), schedule.trace():
            pass
        with pytest.raises(ScheduleError, match="no timeline yet"):
            _ = trace.timeline
    assert repr(trace) == "Trace(nothing)"


@pytest.mark.parametrize("traced", [False, True])
def test_ranges_of_the_profiler(traced: bool) -> None:
    stages = [tl.PipelineStage(nn.Linear(4, 4), s, 2, torch.device("cpu")) for s in (0, 1)]
    schedule = tl.ScheduleInterleavedZeroBubble(stages, 2, nn.functional.mse_loss)
    batch = torch.ones(4, 4)
    schedule.step(batch, target=batch)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        if traced:
            with schedule.trace() as trace:
                schedule.step(batch, target=batch)
            assert len(trace.timelines) == 1
        else:
            schedule.step(batch, target=batch)
    schedule.step(batch, target=batch)
    found = [event.name for event in profile.events() or () if event.name.startswith("taktline ")]
    rows = schedule.plan.rows
    assert sorted(found) == sorted(f"taktline {rows.leaf(row)}" for row in range(len(rows)))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([5.0, 1.0], [7.0, 3.0]),  # the first was waited for, so its time is known
        ([5.0, 8.5], [7.0, 9.1]),  # the second arrives before it is used
    ],
)
def test_when_messages_arrive(sent: list[float], expected: list[float]) -> None:
    began, arrived = np.array([3.0, 9.0]), np.array([7.0, 9.1])
    assert _arrivals(np.array(sent), began, arrived).tolist() == expected
    if sent[1] > 8:
        assert _arrivals(np.array(sent[1:]), began[1:], arrived[1:]).tolist() == [8.5]


def test_rows_without_work_take_no_time() -> None:
    """A plan may speak of sharded stages, and run on some that are not."""
    plan = lower(build("1f1b", ranks=2, microbatches=2), keep_ready=1, reduce=True)

    def main(rank: int) -> Timeline:
        stage = tl.PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
        schedule = tl.ScheduleFromPlan([stage], plan, nn.functional.mse_loss)
        with schedule.trace() as trace:
            schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
        return trace.timeline

    timeline = local.run(main, 2)[0]
    assert timeline.plan == plan
    for rank in (0, 1):
        spans = list(timeline.spans(rank))
        idle = [s for s in spans if not s.action.kind.has_microbatch]
        assert idle
        assert all(s.start == s.end for s in idle)
        assert all(a.end <= b.start for a, b in pairwise(spans))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_cuda(case: Case) -> None:
    """Several local ranks on one GPU, whose own clock tells."""
    case = replace(case, device="cuda")
    torch.zeros(1, device="cuda")
    for rank in run_case_locally(case, traced=True):
        check(rank.timelines, case, rank.clock_error)


class FarAway(Transport):
    """A transport between two clocks: what rank 1 shows is that much ahead."""

    rank, size = 0, 2

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead

    def _gather(self, mine: Frame) -> list[Frame]:
        time.sleep(0.001)
        numbers = np.frombuffer(mine.data, np.int64)
        shown = self._ahead if len(numbers) > 1 else 0
        return [mine, Frame(mine.what, (numbers + shown).tobytes())]

    def open(self, channels: Sequence[Channel]) -> None: ...

    def sender(self, channel: Channel, *, eager: bool = False) -> Post:
        raise KeyError(channel)

    def receiver(self, channel: Channel) -> Post:
        raise KeyError(channel)


def test_clocks_of_one_machine_are_equal() -> None:
    assert local.run(lambda rank: align(transport_of()), 3) == [([0, 0, 0], 0)] * 3


@pytest.mark.parametrize("ahead", [10**15, -(10**10)])
def test_those_of_two_machines_are_compared(ahead: int) -> None:
    (first, second), error = align(FarAway(ahead))
    assert first == 0
    assert error > 0
    assert abs(second - ahead) <= error
