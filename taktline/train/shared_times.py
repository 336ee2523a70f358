"""The times of layers, measured by one process and known to all, so that all cut alike."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from taktline.checkpoint.model_state import Processes
from taktline.checks import conform
from taktline.split.arguments import Call
from taktline.split.costs import Measure, measure_times
from taktline.split.steps import Cut
from taktline.train.ranks import Ranks


def shared_times(ranks: Ranks) -> Measure:
    """Returns the times that the first process of all replicas has measured, on its device."""
    processes = Processes(ranks.everyone)

    def measure(model: nn.Module, units: Iterable[str], call: Call) -> dict[Cut, float]:
        def measured() -> list[tuple[str, int, float]]:
            if processes.place:
                return []
            times = measure_times(model, units, call, ranks.device)
            return [(cut.unit, cut.call, took) for cut, took in times.items()]

        found = processes.everywhere(measured, "measure the layers", "Pipeline(measure=True)")
        rows = conform(found[0], [(str, int, float)], what="the times of layers")
        return {Cut(unit, at): took for unit, at, took in rows}

    return measure
