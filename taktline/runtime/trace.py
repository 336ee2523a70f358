"""Traces: when each action ran, on every rank, as timelines like those of a simulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd import profiler
from torch.profiler import record_function

from taktline.errors import ScheduleError
from taktline.plan import Action, Costs, Plan, Straggler, Timeline, stragglers
from taktline.plan.deps import needs
from taktline.plan.rows import FloatArray, Rows
from taktline.runtime.bind import Bound
from taktline.runtime.program import Instruction, Wrap
from taktline.text import counted
from taktline.transport import Transport

_MS = 1e6
"""Nanoseconds."""
_Times: TypeAlias = npt.NDArray[np.int64]
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
        """One for each step and eval, in milliseconds from the first action on; filled on leaving.

        All ranks have the same.
        """
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


class HostClock:
    """The clock of this process."""

    error = 0
    """By how many nanoseconds a time may be wrong at most."""
    stamp = staticmethod(time.perf_counter_ns)
    """A cheap mark of this moment, to be read later."""

    def read(self, stamps: Sequence[int]) -> list[int]:
        """Stamps as nanoseconds of this process."""
        return list(stamps)


class CudaClock:
    """The clock of a GPU: a stamp marks when its current stream gets there.

    Both clocks are compared at the beginning and when stamps are read, on an idle GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.error = 0
        self._device = device
        self._first = self._compared()

    def stamp(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, stamps: Sequence[torch.cuda.Event]) -> list[int]:
        """Wait for the GPU; returns stamps as nanoseconds of this process."""
        (first, began), (last, ended) = self._first, self._compared()
        # Nanoseconds of this process in a millisecond of the GPU: the two quartzes differ a little.
        pace = (ended - began) / max(first.elapsed_time(last), 1e-6)
        if not stamps:
            return []
        # From the first stamp on: elapsed_time has seven digits only.
        base = began + pace * first.elapsed_time(stamps[0])
        return [round(base + pace * stamps[0].elapsed_time(stamp)) for stamp in stamps]

    def _compared(self) -> tuple[torch.cuda.Event, int]:
        """An event, and its time on the clock of this process."""
        torch.cuda.synchronize(self._device)
        before = time.perf_counter_ns()
        event = self.stamp()
        event.synchronize()
        after = time.perf_counter_ns()
        self.error = max(self.error, (after - before) // 2)
        return event, (before + after) // 2


Clock: TypeAlias = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class Offsets:
    """How far the clock of each rank is ahead of that of rank 0, in nanoseconds."""

    ahead: Sequence[int]
    error: int
    """By how many nanoseconds one of them may be wrong at most."""


def align(transport: Transport) -> Offsets:
    """Compare the clocks of all ranks, which all take part.

    No rank leaves an exchange before all have entered it. So each round bounds how far the clock of
    a rank is ahead, from below (it entered before rank 0 left) and from above::

        rank 0   ├── enters ─────── leaves ──┤
        rank r       ├── enters ─────── leaves ──┤

    Two clocks count as one, as on one machine, unless a round contradicts that.
    """
    times: list[int] = []
    for _ in range(_ROUNDS):
        times.append(time.perf_counter_ns())
        transport.exchange([0], "the clocks of a trace")
        times.append(time.perf_counter_ns())
    all_ranks = transport.exchange(times, "the clocks of a trace")
    enters, leaves = [[row[at::2] for row in all_ranks] for at in (0, 1)]
    ahead, error = [], 0
    for entered, left in zip(enters, leaves, strict=True):
        least = max(mine - zero for mine, zero in zip(entered, leaves[0], strict=True))
        most = min(mine - zero for mine, zero in zip(left, enters[0], strict=True))
        one = least <= 0 <= most
        ahead.append(0 if one else (least + most) // 2)
        error = max(error, 0 if one else (most - least) // 2)
    return Offsets(ahead, error)


@dataclass(slots=True)
class _StepTimes:
    """The recorded actions of one step on this rank."""

    plan: Plan
    offsets: Offsets
    actions: list[Action] = field(default_factory=list)
    stamps: list[Any] = field(default_factory=list)
    """Three of each action: when it began, when its values had arrived, and when it ended."""


class TraceRecorder:
    """Records the steps of this rank while there is a trace."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.records: list[_StepTimes] = []
        """The steps that have worked on every rank."""
        self._latest: _StepTimes | None = None
        self._arrived: Any = None

    @contextmanager
    def watch(self, bound: Bound, transport: Transport, profiled: bool) -> Iterator[Wrap]:
        """Record a step; all ranks take part."""
        record = self._latest = _StepTimes(bound.plan, align(transport))
        with ExitStack() as stack:
            for work in bound.works.values():
                stack.enter_context(work.noting(self._note))
            yield lambda instruction: self._recorded(
                record, instruction.action, _named(instruction) if profiled else instruction.run
            )

    def keep(self) -> None:
        """Keep the latest step: it has worked on every rank."""
        if self._latest is not None:
            self.records.append(self._latest)
            self._latest = None

    def fill(self, trace: Trace, transport: Transport, ranks: range) -> None:
        """Gather the kept steps of all ranks, which all take part."""
        for record in self.records:
            timeline, error = _gather(record, self, transport, ranks)
            trace.timelines.append(timeline)
            # The errors of two clocks add up.
            trace.clock_error = max(trace.clock_error, 2 * error / _MS)

    def _note(self) -> None:
        self._arrived = self.clock.stamp()

    def _recorded(
        self, record: _StepTimes, action: Action, run: Callable[[], None]
    ) -> Callable[[], None]:
        stamp, keep = self.clock.stamp, record.stamps.extend
        record.actions.append(action)

        def recorded() -> None:
            self._arrived = None
            began = stamp()
            run()
            ended = stamp()
            keep((began, began if self._arrived is None else self._arrived, ended))

        return recorded


def watching(
    recorder: TraceRecorder | None, bound: Bound, transport: Transport
) -> AbstractContextManager[Wrap | None]:
    """The wrapper for the instructions of a step: None without a trace and a profiler."""
    # Read once a step: the flag changes when a profiler starts and stops.
    profiled = getattr(profiler, "_is_profiler_enabled", True)
    if recorder is None:
        return nullcontext(_named if profiled else None)
    return recorder.watch(bound, transport, profiled)


def _named(instruction: Instruction) -> Callable[[], None]:
    """Run an instruction in a named range of PyTorch's profiler."""
    name, run = f"taktline {instruction.action}", instruction.run

    def named() -> None:
        with record_function(name):
            run()

    return named


def _gather(
    record: _StepTimes, recorder: TraceRecorder, transport: Transport, ranks: range
) -> tuple[Timeline, int]:
    """The timeline of one step, and the error of its clocks; all ranks take part."""
    plan = _apart(record.plan)
    read = np.array(recorder.clock.read(record.stamps), np.int64).reshape(-1, 3)
    rank_of = np.array([plan.placement.rank_of[action.stage] for action in record.actions])
    by_rank = {rank: np.flatnonzero(rank_of == rank) for rank in ranks}
    mine = np.concatenate(
        [
            _times([record.actions[i] for i in at], read[at], plan.rows_of(rank))
            for rank, at in by_rank.items()
        ]
    )
    lengths = 3 * np.diff(plan.offsets[:: len(ranks)])  # each process runs as many ranks
    room = int(lengths.max())
    padding = [0] * (room - mine.size)
    numbers = [recorder.clock.error, *mine.ravel().tolist(), *padding]
    shared = transport.exchange(numbers, "the end of trace()")
    columns = np.concatenate(
        [
            np.reshape(numbers[1 : 1 + length], (-1, 3)) - ahead
            for numbers, length, ahead in zip(shared, lengths, record.offsets.ahead, strict=True)
        ]
    )
    # Subtracted as integers: floats have fewer digits than a clock.
    began, arrived, ended = ((columns - columns.min()) / _MS).T
    return _timeline(plan, began, arrived, ended), record.offsets.error + max(
        numbers[0] for numbers in shared
    )


def _apart(plan: Plan) -> Plan:
    """The plan as it ran: the two halves of an overlapped pair one after the other."""
    if not plan.rows.joined.any():
        return plan
    by_rank = [plan.rows_of(rank) for rank in range(plan.ranks)]
    rows = [Rows.of(part.kind, part.stage, part.microbatch) for part in by_rank]
    return plan.with_rows(rows, plan.level)


def _times(actions: Sequence[Action], read: _Times, rows: Rows) -> _Times:
    """The three times of each row; a row without an instruction takes no time."""
    times = np.empty((len(rows), 3), np.int64)
    done = 0
    for row in range(len(rows)):
        if done < len(actions) and rows.leaf(row) == actions[done]:
            times[row] = read[done]
            done += 1
        else:
            times[row] = read[done - 1, 2] if done else read[0, 0]
    return times


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
