"""What layers are counted to cost, against the times that they take.

``python -m tests.zoo --costs`` compares all architectures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from taktline.split.auto import measure_times, record_layers
from taktline.split.by_names import as_call
from tests.zoo.architecture import Architecture

_MATTERS = 0.01
"""Kinds of layers that take less of the model's time are left out of the worst ratio."""


class Kind(NamedTuple):
    """Layers of one model that are counted alike."""

    layers: int
    counted: float
    """Of one of them."""
    measured: float
    """In milliseconds: their median."""


class Compared(NamedTuple):
    """The costs of one architecture."""

    name: str
    kinds: list[Kind]

    @property
    def mixed(self) -> bool:
        """Whether there are several kinds of layers."""
        return len(self.kinds) > 2

    @property
    def ratio(self) -> float:
        """How far a kind of layers is off, of those that matter: 2 for twice or half its time."""
        counted = sum(kind.layers * kind.counted for kind in self.kinds)
        measured = sum(kind.layers * kind.measured for kind in self.kinds)
        off = [
            (kind.counted / counted) / (kind.measured / measured)
            for kind in self.kinds
            if kind.layers * kind.measured > _MATTERS * measured
        ]
        return max(max(each, 1 / each) for each in off)


def compare(architecture: Architecture, rows: int = 2) -> Compared:
    """Count the layers of an architecture, and measure them by the time of the processor."""
    model = architecture.make()
    call = as_call(model, architecture.call(rows))
    record = record_layers(model, call)[1]
    clock = {"_clock": time.process_time}  # others may be busy, too
    with mock.patch.dict(measure_times.__globals__, clock):
        measured = measure_times(model, record)
    alike: dict[float, list[float]] = defaultdict(list)
    for cut, cost in record.costs.items():
        if cut in measured:
            alike[cost].append(measured[cut])
    return Compared(
        architecture.name,
        [Kind(len(each), cost, median(each)) for cost, each in alike.items()],
    )


def rank_correlation(pairs: Sequence[tuple[float, ...]]) -> float:
    """Spearman's: 1 if both orders are the same."""
    ranks = [np.argsort(np.argsort(column)) for column in zip(*pairs, strict=True)]
    table: Any = np.corrcoef(np.array(ranks))
    return float(table[0, 1])


def correlation_of(found: Sequence[Compared]) -> float:
    """Whether layers of all architectures are in the order of their times: 1 if they are."""
    return rank_correlation([kind[1:] for each in found for kind in each.kinds])


def report(found: Sequence[Compared]) -> str:
    """The figures of all architectures."""
    ratios = sorted((each.ratio, each.name) for each in found)
    within = [rank_correlation([kind[1:] for kind in each.kinds]) for each in found if each.mixed]
    middle = median(ratio for ratio, _ in ratios)
    worst = ", ".join(f"{name} {ratio:.1f}" for ratio, name in ratios[-3:])
    return (
        f"{len(found)} architectures, {sum(len(each.kinds) for each in found)} kinds of layers: "
        f"rank correlation {correlation_of(found):.2f}, within a model {median(within):.2f}; "
        f"factor between shares: median {middle:.1f}, worst {worst}"
    )
