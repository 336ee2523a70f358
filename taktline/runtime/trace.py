"""Traces: when each action ran, on every rank, as timelines like those of a simulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from taktline.errors import ScheduleError
from taktline.plan import Action, Costs, Kind, Plan, Straggler, Timeline, stragglers
from taktline.plan.deps import needs
from taktline.plan.rows import FloatArray, Rows
from taktline.runtime.program import Instruction, Program
from taktline.stage.offload import copies_on
from taktline.text import counted
from taktline.transport import Transport

_MS = 1e6
"""Nanoseconds."""
_ROUNDS = 8
"""How often the ranks compare their clocks; the best rounds count."""


class Trace:
    """The timelines of the steps inside of ``with schedule.trace() as trace``, on every rank.

    It has the methods of the last timeline, too, such as ``bubble()``.

    >>> trace = Trace()
    >>> trace.timelines
    []
    """

    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        """One for each step and eval, in milliseconds, equal on all ranks; filled on leaving."""
        self.clock_error = 0.0
        """By how many milliseconds the clocks of two ranks may differ; 0 on one machine's CPUs."""
        self.work: Costs | None = None
        """The work of the stages, if it was counted: in a ``Pipeline`` with an example."""

    @property
    def timeline(self) -> Timeline:
        """The last timeline."""
        if not self.timelines:
            raise ScheduleError(
                "no timeline yet: run a step inside schedule.trace(), and leave the block"
            )
        return self.timelines[-1]

    def stragglers(self, *, factor: float = 1.3) -> list[Straggler]:
        """Stages that were slow for their work; see :func:`taktline.plan.timeline`."""
        return stragglers(self.timelines, work=self.work, factor=factor)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.timeline, name)

    def __repr__(self) -> str:
        if not self.timelines:
            return "Trace(nothing)"
        steps = counted(len(self.timelines), "timeline")
        return f"Trace({steps}, the last one: {self.timeline})"

    def _repr_svg_(self) -> str | None:
        return self.timeline._repr_svg_() if self.timelines else None


class Clock:
    """The clock of this process, or of a GPU: compared with it once, while the GPU is idle.

    A stamp is a cheap mark of a moment, to be read later; on a GPU, of when its current stream gets
    there.
    """

    def __init__(self, device: torch.device) -> None:
        self.error = 0
        """By how many nanoseconds a time may be wrong at most."""
        self.device = device
        self._device = device if device.type == "cuda" else None
        if self._device is None:
            self.stamp: Callable[[], Any] = time.perf_counter_ns
            return
        self.stamp = self._event
        torch.cuda.synchronize(device)
        before = time.perf_counter_ns()
        self._first = self.stamp()
        self._first.synchronize()
        after = time.perf_counter_ns()
        self._began, self.error = (before + after) // 2, (after - before) // 2

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """Stamps as nanoseconds of this process; waits for the GPU."""
        if self._device is None or not stamps:
            return [*stamps]
        torch.cuda.synchronize(self._device)
        # From the first stamp on: elapsed_time has seven digits only.
        base = self._began + _MS * self._first.elapsed_time(stamps[0])
        return [round(base + _MS * stamps[0].elapsed_time(stamp)) for stamp in stamps]


def align(transport: Transport) -> tuple[list[int], int]:
    """How far the clock of each rank is ahead of rank 0's, and the largest error, in nanoseconds.

    All ranks take part. None leaves an exchange before all have entered it, so each round bounds
    how far the clock of a rank is ahead, from below (it entered before rank 0 left) and from above.
    Two clocks count as one, as on one machine, unless a round contradicts that.
    """
    times: list[int] = []
    for _ in range(_ROUNDS):
        times.append(time.perf_counter_ns())
        transport.exchange([0], "the clocks of a trace")
        times.append(time.perf_counter_ns())
    all_ranks = np.array(transport.exchange(times, "the clocks of a trace"))
    enters, leaves = all_ranks[:, 0::2], all_ranks[:, 1::2]
    least, most = (enters - leaves[0]).max(axis=1), (leaves - enters[0]).min(axis=1)
    differ = (least > 0) | (most < 0)
    return (differ * (least + most) // 2).tolist(), int((differ * (most - least) // 2).max())


@dataclass(slots=True)
class _Step:
    """The recorded actions of one step on this rank."""

    plan: Plan
    ahead: list[int]
    """How far the clock of each rank is ahead of that of rank 0."""
    error: int
    """By how much that may be wrong."""
    actions: list[Action] = field(default_factory=list)
    stamps: list[Any] = field(default_factory=list)
    """Three of each action: when it began, when its values had arrived, and when it ended."""


class TraceRecorder:
    """Records the steps of this rank while there is a trace."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self._steps: list[_Step] = []
        """Those that have worked on every rank."""
        self._latest: _Step | None = None
        self._arrived: Any = None

    @contextmanager
    def watch(
        self, program: Program, transport: Transport, profiled: bool
    ) -> Iterator[Callable[[Instruction], None]]:
        """Record a step; all ranks take part. Its instructions are run by what is yielded."""
        step = self._latest = _Step(program.binding.plan, *align(transport))
        stamp = self.clock.stamp
        copies = copies_on(self.clock.device) if step.plan.has(Kind.OFFLOAD) else None

        def note() -> None:
            self._arrived = stamp()

        def recorded(instruction: Instruction) -> None:
            self._arrived, began = None, stamp()
            run_named(instruction) if profiled else instruction.run()
            arrived = began if self._arrived is None else self._arrived
            step.actions.append(instruction.action)
            ended = stamp()
            if copies is not None and instruction.action.kind in (Kind.OFFLOAD, Kind.RELOAD):
                began, ended = copies.latest  # beside what the rank computes
                arrived = began
            step.stamps += began, arrived, ended

        for work in program.works.values():
            work.arrived = note
        if copies is not None:
            copies.stamp = stamp
        try:
            yield recorded
        finally:
            if copies is not None:
                copies.stamp = lambda: None
            for work in program.works.values():
                work.arrived = None

    def keep(self) -> None:
        """Keep the latest step: it has worked on every rank."""
        if self._latest is not None:
            self._steps.append(self._latest)
            self._latest = None

    def fill(self, trace: Trace, transport: Transport, ranks: range) -> None:
        """Gather the kept steps of all ranks, which all take part."""
        for step in self._steps:
            timeline, error = _gather(step, self.clock, transport, ranks)
            trace.timelines.append(timeline)
            # The errors of two clocks add up.
            trace.clock_error = max(trace.clock_error, 2 * error / _MS)


def run_named(instruction: Instruction) -> None:
    """Run an instruction in a named range of PyTorch's profiler."""
    with record_function(f"taktline {instruction.action}"):
        instruction.run()


def _gather(step: _Step, clock: Clock, transport: Transport, ranks: range) -> tuple[Timeline, int]:
    """The timeline of one step, and the error of its clocks; all ranks take part."""
    plan = step.plan
    if plan.rows.joined.any():  # the two halves of an overlapped pair ran one after the other
        by_rank = [plan.rows_of(rank) for rank in range(plan.ranks)]
        rows = [Rows.of(part.kind, part.stage, part.microbatch) for part in by_rank]
        plan = plan.with_rows(rows, plan.level)
    read = clock.read(step.stamps)
    mine = [clock.error]
    for rank in ranks:
        ran = [
            (action, read[3 * i : 3 * i + 3])
            for i, action in enumerate(step.actions)
            if plan.placement.rank_of[action.stage] == rank
        ]
        mine += chain.from_iterable(_times(ran, plan.rows_of(rank)))
    shared = transport.exchange(mine, "the end of trace()", ragged=True)
    columns = np.concatenate(
        [np.reshape(t[1:], (-1, 3)) - ahead for t, ahead in zip(shared, step.ahead, strict=True)]
    )
    # Subtracted as integers: floats have fewer digits than a clock.
    began, arrived, ended = ((columns - columns.min()) / _MS).T
    error = step.error + max(times[0] for times in shared)
    return _timeline(plan, began, arrived, ended), error


def _times(ran: Sequence[tuple[Action, list[int]]], rows: Rows) -> Iterator[list[int]]:
    """The three times of each row; a row without an instruction takes no time."""
    done, times = 0, ran[0][1][:1] * 3 if ran else []
    for row in range(len(rows)):
        if done < len(ran) and rows.leaf(row) == ran[done][0]:
            times = ran[done][1]
            done += 1
        else:
            times = times[2:] * 3
        yield times


def _timeline(plan: Plan, began: FloatArray, arrived: FloatArray, ended: FloatArray) -> Timeline:
    """A timeline of when each action computed, without its wait for values."""
    source = needs(plan).waits
    target = np.flatnonzero(source >= 0)
    # From the beginning of the send: its rank may be held up after the message has left.
    there = _arrivals(began[source[target]], began[target], arrived[target])
    arrival = ended.copy()
    arrival[source[target]] = there
    start = began.copy()
    start[target] = np.where(there > began[target], arrived[target], began[target])
    timeline = Timeline(plan, start, ended, Costs(unit="ms"), arrival, measured=True)
    return replace(timeline, costs=Costs.from_timeline(timeline))


def _arrivals(sent: FloatArray, began: FloatArray, arrived: FloatArray) -> FloatArray:
    """When each message arrived.

    The time is known where the receiver was already waiting when the message was sent. The others
    are taken to travel as long as the median of these.
    """
    seen = sent > began
    if not seen.any():
        return np.minimum(sent, arrived)
    flight = float(np.median((arrived - sent)[seen]))
    return np.where(seen, arrived, np.minimum(sent + flight, arrived))
