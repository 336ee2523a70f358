"""Schedules that were measured in turn, and which of them to choose."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from taktline.plan import Costs, Kind, Plan, Timeline, simulate


@dataclass(frozen=True)
class MeasuredSchedule:
    """A schedule, with a measured step of each round."""

    plan: Plan
    measured: Sequence[Timeline]
    apart: bool
    """Whether the ranks ran at the same time. If they took turns, in one thread, the step is
    predicted from how long each action took."""

    @cached_property
    def rounds(self) -> list[Timeline]:
        """The steps, as measured or as predicted."""
        if self.apart:
            return list(self.measured)
        return [simulate(self.plan, durations(timeline)) for timeline in self.measured]

    @cached_property
    def middle(self) -> Timeline:
        """The step that takes the median of the times; the one that is drawn."""
        return sorted(self.rounds, key=lambda step: step.makespan)[len(self.rounds) // 2]

    @property
    def noise(self) -> float:
        """How far half of the rounds are from the median, at most."""
        return statistics.median(abs(s.makespan - self.middle.makespan) for s in self.rounds)

    @property
    def in_flight(self) -> float:
        """The most micro-batches whose activations a rank keeps at once."""
        share = self.plan.ranks / self.plan.stages
        return float(simulate(self.plan, Costs(activation=share)).peak_memory.max())

    def row(self) -> dict[str, str]:
        """Its line in the table."""
        predicted = simulate(self.plan, Costs.from_timeline(*self.measured)).makespan
        return {
            "schedule": self.plan.name,
            "stages": str(self.plan.stages),
            "step/ms": f"{self.middle.makespan:.0f}",
            "±": f"{self.noise:.0f}",
            "predicted": f"{predicted:.0f}" if self.apart else "–",
            "bubble": f"{self.middle.bubble():.1%}",
            "in flight": f"{self.in_flight:g}",
        }


def durations(timeline: Timeline) -> Costs:
    """The costs of a step without any waiting or messages: as if each rank went on at once."""
    rows = timeline.plan.rows
    took = np.where(rows.kind <= Kind.W, timeline.end - timeline.start, 0.0)
    end = np.cumsum(np.where(rows.second_of_pair(), 0.0, took))
    return Costs.from_timeline(replace(timeline, start=end - took, end=end, arrival=None))


def conclusion(schedules: Sequence[MeasuredSchedule]) -> str:
    """The choice that the table supports, as far as the noise allows."""
    fastest, second, *_ = sorted(schedules, key=lambda schedule: schedule.middle.makespan)
    close = [
        schedule
        for schedule in schedules
        if schedule.middle.makespan - fastest.middle.makespan <= max(schedule.noise, fastest.noise)
    ]
    lines = [
        "step: the median of rounds in which they took turns; ±: half of them were as near to it; "
        "predicted:\nby the simulator, from the measured costs; bubble: of that step, as on the "
        "page; in flight: the\nmicro-batches that a rank keeps at once."
        if fastest.apart
        else "These ranks share a thread, so step and bubble are those that the simulator "
        "predicts for a process\neach, from how long each action took. In flight: the "
        "micro-batches that a rank keeps at once."
    ]
    if len(close) == 1:
        gain = 1 - fastest.middle.makespan / second.middle.makespan
        choice = f"{fastest.plan.name} here: {gain:.0%} less time than {second.plan.name}"
    else:
        lean = min(close, key=lambda schedule: (schedule.in_flight, schedule.middle.makespan))
        names = ", ".join(schedule.plan.name for schedule in close)
        lines.append(f"The noise of this machine hides how {names} differ.")
        choice = f"{lean.plan.name} here: none of them keeps fewer micro-batches"
    lines.append(f"So choose {choice}.")
    return "\n".join(lines)
