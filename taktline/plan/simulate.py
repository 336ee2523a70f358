"""Simulates a plan with given costs; the result is a timeline."""

from __future__ import annotations

import numpy as np

from taktline.checks import known_keywords, require_instance
from taktline.plan.action import Kind
from taktline.plan.costs import Costs
from taktline.plan.deps import channels, needs
from taktline.plan.passes import add_comm
from taktline.plan.plan import Plan
from taktline.plan.timeline import Timeline
from taktline.plan.validate import require_valid
from taktline.plan.walk import walk


@known_keywords
def simulate(plan: Plan, costs: Costs | None = None) -> Timeline:
    """Simulate a plan: every action runs as early as its rank and its dependencies allow.

    If messages can delay actions, by queueing or by keeping their sender busy, the timeline is that
    of the lowered plan.

    >>> from taktline.plan import build
    >>> timeline = simulate(build("1f1b", ranks=4, microbatches=8), Costs(forward=1.0))
    >>> timeline.makespan
    33.0
    """
    costs = Costs() if costs is None else require_instance("costs", costs, Costs)
    require_valid(plan)
    if costs.messages_matter:
        plan = add_comm(plan)
    rows = plan.rows
    duration = costs.durations(plan)
    channel = channels(plan)
    # A gradient is as large as its activation, which the stage before has sent.
    backward = np.isin(rows.kind, (Kind.B, Kind.I, Kind.SEND_B))
    size = costs.of("message_bytes", plan.stages)[np.maximum(rows.stage - backward, 0)]
    occupies = np.where(channel >= 0, size / costs.link.bandwidth, 0.0)
    delay = np.where(channel >= 0, costs.link.latency, 0.0)
    if costs.comm_blocks:
        duration += occupies + delay
        occupies = delay = 0.0
    waits = needs(plan).waits
    run = walk(plan, waits, duration, channel=channel, occupies=occupies, delay=delay)
    return Timeline(plan, run.start, run.start + duration, costs, run.arrival)
