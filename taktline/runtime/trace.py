"""What ran when, on every rank, as timelines like those of a simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from taktline.errors import ScheduleError
from taktline.plan import Action, Costs, Plan, Straggler, Timeline, stragglers
from taktline.plan.deps import needs
from taktline.plan.rows import FloatArray, Rows
from taktline.runtime.clocks import clock_for
from taktline.runtime.recorder import Record, Recorder
from taktline.text import counted
from taktline.transport import Transport

__all__ = ["Trace", "tracing"]

_MS = 1e6
"""Nanoseconds."""
_Times: TypeAlias = npt.NDArray[np.int64]


class Trace:
    """The timelines of what ran inside of ``with schedule.trace() as trace``, on every rank.

    What it is asked for beyond these, such as ``bubble()``, it asks the last one for.

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
        """The work of the stages, if somebody has counted it: a ``Pipeline`` with an example."""

    @property
    def timeline(self) -> Timeline:
        """The last one."""
        if not self.timelines:
            raise ScheduleError(
                "there is no timeline: run a step inside of schedule.trace(), and leave it"
            )
        return self.timelines[-1]

    def stragglers(self, *, factor: float = 1.3) -> list[Straggler]:
        """Stages that were slow for their work; see :func:`taktline.plan.stragglers`."""
        return stragglers(self.timelines, work=self.work, factor=factor)

    def __getattr__(self, name: str) -> Any:
        # So that what is asked of a timeline can be asked here, of the last one.
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


class _Traced(Protocol):
    """What runs the steps."""

    recorder: Recorder | None

    @property
    def transport(self) -> Transport: ...

    @property
    def ranks(self) -> range: ...

    @property
    def device(self) -> torch.device: ...


@contextmanager
def tracing(runner: _Traced) -> Iterator[Trace]:
    """Note every step inside; on leaving, unless by an error, gather them from all ranks."""
    if runner.recorder is not None:
        raise ScheduleError("this schedule is being traced already; leave that block first")
    trace, recorder = Trace(), Recorder(clock_for(runner.device))
    runner.recorder = recorder
    try:
        yield trace
    finally:
        runner.recorder = None
    for record in recorder.records:
        timeline, error = _gather(record, recorder, runner.transport, runner.ranks)
        trace.timelines.append(timeline)
        # Both of two clocks may be wrong.
        trace.clock_error = max(trace.clock_error, 2 * error / _MS)


def _gather(
    record: Record, recorder: Recorder, transport: Transport, ranks: range
) -> tuple[Timeline, int]:
    """The timeline of one step, and by how much its clocks may be wrong; all ranks take part."""
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
    # Before they are floats, which have fewer digits than a clock has.
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
    """The three times of each row; one that had nothing to do took no time."""
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
    """When each action computed, without the time in which it waited for its values."""
    rank, source = plan.rank_of_rows(), needs(plan).arrival
    target = np.flatnonzero((source >= 0) & (rank[source] != rank))
    # From the beginning of the send: its rank may be held up in it when the message has left.
    there = _arrivals(began[source[target]], began[target], arrived[target])
    arrival = ended.copy()
    arrival[source[target]] = there
    start = began.copy()
    start[target] = np.where(there > began[target], arrived[target], began[target])
    timeline = Timeline(plan, start, ended, Costs(unit="ms"), arrival, measured=True)
    return replace(timeline, costs=Costs.from_timeline(timeline))


def _arrivals(sent: FloatArray, began: FloatArray, arrived: FloatArray) -> FloatArray:
    """When each message was there.

    That is seen where it was sent after its receiver had begun to wait. Others may have been there
    long before: they are taken to have been on their way as long as those are, in the median.
    """
    seen = sent > began
    if not seen.any():
        return np.minimum(sent, arrived)
    flight = float(np.median((arrived - sent)[seen]))
    return np.where(seen, arrived, np.minimum(sent + flight, arrived))
