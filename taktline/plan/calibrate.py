"""Estimates costs from timelines, so that the simulator predicts the measured times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taktline.checks import require_instances
from taktline.errors import CostError
from taktline.plan.action import Kind
from taktline.plan.costs import Costs, Link
from taktline.plan.deps import needs
from taktline.plan.rows import FloatArray, IntArray, known_medians
from taktline.plan.timeline import Timeline


def calibrate(timelines: Sequence[Timeline]) -> Costs:
    """The costs that these timelines show together.

    The cost of a stage is the mean over its micro-batches, so that the sum is the time that its
    rank spent on them. Of several timelines it is the median, so that a disturbed step does not
    count.

    An action costs the time from when it could have begun, its rank being free and its inputs
    there, until its end. That includes the time that a rank spends on messages in between::

        rank 0 │ 0F0─── SEND  0F1───
               │       └──────────── cost of 0F1

    A message costs one latency, whatever its size. If the plans have no I and W, these share the
    time of a backward as in the other stages, or equally; without any backward, each takes as long
    as a forward.
    """
    timelines = require_instances("timelines", timelines, Timeline)
    first = timelines[0].costs
    stages = timelines[0].plan.stages
    for timeline in timelines[1:]:
        if (timeline.plan.stages, timeline.costs.unit) != (stages, first.unit):
            raise CostError(
                "costs need timelines of one model, with equal numbers of stages, in one unit"
            )
    means = np.stack([_means(timeline) for timeline in timelines])
    rows: list[FloatArray] = list(known_medians(means, axis=0))
    forward, full, split_input, split_weight, pair = rows
    forward = _filled(forward, pair / 3)
    with np.errstate(invalid="ignore"):  # both halves may take no time
        shares: FloatArray = split_input / (split_input + split_weight)
    share = _filled(shares, np.full(stages, 0.5))
    split_input = _filled(np.where(np.isnan(split_input), share * full, split_input), forward)
    split_weight = _filled(
        np.where(np.isnan(split_weight), (1 - share) * full, split_weight), forward
    )
    backward = np.where(np.isnan(full), split_input + split_weight, full)
    overlap = np.where(np.isnan(pair), forward + backward, pair)
    flights = [flight.mean() for t in timelines if len(flight := _flights(t))]
    return Costs(
        forward=tuple(forward),
        backward_input=tuple(split_input),
        backward_weight=tuple(split_weight),
        backward=None if np.isnan(full).all() else tuple(backward),
        overlap=None if np.isnan(pair).all() else tuple(overlap),
        link=Link(latency=max(0.0, float(np.median(flights))) if flights else 0.0),
        comm_blocks=first.comm_blocks,
        activation=first.activation,
        kept_for_weight=first.kept_for_weight,
        unit=first.unit,
    )


_PAIR = -1
"""Beside the kinds of actions: an overlapped pair, by its forward's stage."""


def _means(timeline: Timeline) -> FloatArray:
    """A row each for F, B, I, W and pairs, with the mean of each stage, or nan."""
    kind, stage, cost = _actions(timeline)
    table = np.full((5, timeline.plan.stages), np.nan)
    for row, which in enumerate((Kind.F, Kind.B, Kind.I, Kind.W, _PAIR)):
        for at in np.unique(stage[kind == which]).tolist():
            table[row, at] = cost[(kind == which) & (stage == at)].mean()
    return table


def _actions(timeline: Timeline) -> tuple[IntArray, IntArray, FloatArray]:
    """The kind, stage and cost of each action that computes."""
    rows, rank = timeline.plan.rows, timeline.plan.rank_of_rows()
    at = np.flatnonzero((rows.kind <= Kind.W) & ~rows.second_of_pair())
    before = np.concatenate([at[:1], at[:-1]])
    if timeline.costs.comm_blocks:
        before = np.maximum(at - 1, 0)  # a send has its own time
    alone = (rank[before] != rank[at]) | (before == at)
    ready = np.where(alone, timeline.start[at], timeline.end[before])
    waits = needs(timeline.plan).waits
    for half in (at, at + rows.joined[at]):
        source = waits[half]
        ready = np.where(source >= 0, np.maximum(ready, timeline.arrivals[source]), ready)
    # Clocks differ a little, so a message may seem to arrive after its receiver has started.
    cost = timeline.end[at] - np.minimum(ready, timeline.start[at])
    return np.where(rows.joined[at], _PAIR, rows.kind[at]), rows.stage[at], cost


def _flights(timeline: Timeline) -> FloatArray:
    """How long each message took: from when it could leave until it was there."""
    waits = needs(timeline.plan).waits
    sends = waits[waits >= 0]
    # A send may come long after its action: behind the other half of a pair, for one.
    spelled_out = timeline.plan.rows.kind[sends] > Kind.W
    leaves = np.where(spelled_out, timeline.start[sends], timeline.end[sends])
    return timeline.arrivals[sends] - leaves


def _filled(values: FloatArray, otherwise: FloatArray) -> FloatArray:
    """With the median of the other stages where one is unknown, or else something else."""
    known = values[~np.isnan(values)]
    if len(known):
        return np.where(np.isnan(values), np.median(known), values)
    known = otherwise[~np.isnan(otherwise)]
    return np.where(np.isnan(otherwise), np.median(known) if len(known) else 0.0, otherwise)
