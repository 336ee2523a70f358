"""The time axis that drawings share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from taktline.errors import CostError, PlanError
from taktline.plan.timeline import Timeline


def shared_axis(timelines: Sequence[Timeline]) -> tuple[float, str]:
    """Where the one axis of all timelines ends, and its unit."""
    if not timelines:
        raise PlanError("a drawing without timelines: pass at least one")
    units = sorted({timeline.costs.unit for timeline in timelines})
    if len(units) > 1:
        raise CostError(
            f"times in {' and '.join(map(repr, units))} do not share an axis: use one unit for all "
            "costs"
        )
    return max(timeline.makespan for timeline in timelines) or 1.0, units[0]


def nice_ticks(end: float, most: float) -> list[float]:
    """Round numbers from 0 to ``end``, about ``most`` of them.

    >>> nice_ticks(33, 8)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if end <= 0:
        return [0.0]
    rough = end / max(most, 1.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [number * step for number in range(math.floor(end / step * (1 + 1e-9)) + 1)]
