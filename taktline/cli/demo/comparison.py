"""Schedules that were measured in turn, and which of them to choose."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from taktline.plan import Costs, Kind, Plan, Timeline, simulate

HEADINGS = ["schedule", "stages", "step/ms", "±", "predicted", "bubble", "in flight"]


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

    def row(self) -> list[str]:
        """Its line in the table."""
        predicted = simulate(self.plan, Costs.from_timeline(*self.measured)).makespan
        return [
            self.plan.name,
            str(self.plan.stages),
            f"{self.middle.makespan:.0f}",
            f"{self.noise:.0f}",
            f"{predicted:.0f}" if self.apart else "–",
            f"{self.middle.bubble():.1%}",
            f"{self.in_flight:g}",
        ]


def durations(timeline: Timeline) -> Costs:
    """How long each stage computes, without any waiting."""

    def mean(kind: Kind) -> tuple[float, ...] | None:
        table = timeline.durations(kind)
        return None if np.isnan(table).all(axis=1).any() else tuple(np.nanmean(table, axis=1))

    backward = mean(Kind.B)
    halves = tuple(time / 2 for time in backward or ())
    return Costs(
        forward=mean(Kind.F) or 1.0,
        backward_input=mean(Kind.I) or halves,
        backward_weight=mean(Kind.W) or halves,
        backward=backward,
        unit=timeline.costs.unit,
    )


def conclusion(schedules: Sequence[MeasuredSchedule], apart: bool) -> str:
    """The choice that the table supports, as far as the noise allows."""
    fastest = min(schedules, key=lambda schedule: schedule.middle.makespan)
    close = [
        schedule
        for schedule in schedules
        if schedule.middle.makespan - fastest.middle.makespan <= max(schedule.noise, fastest.noise)
    ]
    lines = [
        "step: the median of rounds in which they took turns; ±: half of them were as near to it; "
        "predicted:\nby the simulator, from the measured costs; bubble: of that step, as on the "
        "page; in flight: the\nmicro-batches that a rank keeps at once."
        if apart
        else "These ranks share a thread, so step and bubble are those that the simulator "
        "predicts for a process\neach, from how long each action took. In flight: the "
        "micro-batches that a rank keeps at once."
    ]
    if len(close) == 1:
        second = min((r for r in schedules if r is not fastest), key=lambda r: r.middle.makespan)
        gain = 1 - fastest.middle.makespan / second.middle.makespan
        choice = f"{fastest.plan.name} here: {gain:.0%} less time than {second.plan.name}"
    else:
        lean = min(close, key=lambda schedule: (schedule.in_flight, schedule.middle.makespan))
        names = ", ".join(schedule.plan.name for schedule in close)
        lines.append(f"The noise of this machine hides how {names} differ.")
        choice = f"{lean.plan.name} here: none of them keeps fewer micro-batches"
    lines.append(f"So choose {choice}.")
    return "\n".join(lines)
