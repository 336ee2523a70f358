"""The cost of actions: times and memory, one number for all stages or one for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from taktline.checks import (
    known_keywords,
    refuse,
    require_flag,
    require_instance,
    require_number,
    require_one_of,
    require_text,
    require_whole,
    shown,
)
from taktline.errors import CostError
from taktline.plan.action import Kind
from taktline.plan.lazy_import import lazy_import
from taktline.plan.placement import MOST_STAGES
from taktline.plan.plan import Plan
from taktline.plan.rows import FloatArray, as_numbers

if TYPE_CHECKING:
    from taktline.plan.timeline import Timeline

PerStage: TypeAlias = float | tuple[float, ...]
"""One number for all stages, or one for each."""


def _checked(name: str, value: Any) -> PerStage:
    """A number, or a tuple of them, all finite and from 0 up."""
    numbers = as_numbers(value)
    if numbers is None or numbers.ndim > 1 or (numbers < 0).any():
        refuse(name, "a number from 0 up, or one for each stage", value, CostError)
    return tuple(map(float, numbers)) if numbers.ndim else float(numbers)


@known_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection between two ranks.

    >>> Link(latency=2.0, bandwidth=10.0).time(50)
    7.0
    """

    latency: float = 0.0
    """From the end of a send to its arrival, in the unit of time of the costs."""
    bandwidth: float = math.inf
    """Bytes in one unit of time. Messages of one channel go one after the other."""

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            number = getattr(self, name)
            if not (name == "bandwidth" and isinstance(number, float) and number == math.inf):
                number = require_number(name, number, least=0, error=CostError)
            object.__setattr__(self, name, number)
        if not self.bandwidth:
            raise CostError(f"bandwidth must be more than 0, not {self.bandwidth}")

    def time(self, bytes: float) -> float:
        """How long one message takes on an idle link."""
        return self.latency + require_number("bytes", bytes, least=0) / self.bandwidth


@known_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times and memory of a plan's actions, as one number for all stages or a sequence of them.

    >>> Costs(forward=1.0, backward_input=1.2, backward_weight=0.8).of("backward", stages=3)
    array([2., 2., 2.])
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    """A full backward; by default backward_input + backward_weight."""
    overlap: PerStage | None = None
    """An overlapped pair, by its forward's stage; by default its forward + its backward."""
    link: Link = Link()
    message_bytes: PerStage = 0.0
    """The bytes that a stage sends forward, and gets back as a gradient, for one micro-batch."""
    comm_blocks: bool = False
    """Whether a rank stops computing while it sends, instead of doing both at once."""
    activation: PerStage = 1.0
    """The memory that a forward keeps for the backward, for one micro-batch."""
    kept_for_weight: PerStage | None = None
    """The part of it that a backward_input leaves for the backward_weight; by default all."""
    unit: str = ""
    """The unit of time, for people: "ms", for example."""

    def __post_init__(self) -> None:
        for name in _PER_STAGE:
            value = getattr(self, name)
            if value is not None or name not in _BY_DEFAULT:
                object.__setattr__(self, name, _checked(name, value))
        require_instance("link", self.link, Link, error=CostError)
        require_flag("comm_blocks", self.comm_blocks, CostError)
        require_text("unit", self.unit, CostError)
        if self.kept_for_weight is not None:
            whole, kept = np.atleast_1d(self.activation), np.atleast_1d(self.kept_for_weight)
            if (1 in (len(whole), len(kept)) or len(whole) == len(kept)) and (kept > whole).any():
                raise CostError("kept_for_weight is a part of activation: it cannot be larger")

    @property
    def messages_matter(self) -> bool:
        """Whether a message can delay the next one, or block its sender."""
        queues = bool(np.any(self.message_bytes)) and math.isfinite(self.link.bandwidth)
        return queues or self.comm_blocks

    def of(self, name: str, stages: int) -> FloatArray:
        """One of the per-stage costs as an array of ``stages`` numbers."""
        require_one_of("name", name, _PER_STAGE, CostError)
        stages = require_whole("stages", stages, least=1, most=MOST_STAGES, error=CostError)
        value: PerStage | None = getattr(self, name)
        if value is None:
            return np.sum([self.of(part, stages) for part in _BY_DEFAULT[name]], axis=0)
        if isinstance(value, tuple) and len(value) != stages:
            raise CostError(
                f"{name} is for {len(value)} stages, but the plan has {stages}; pass one number "
                "for all, or one for each"
            )
        return np.broadcast_to(np.asarray(value, np.float64), (stages,)).copy()

    def durations(self, plan: Plan) -> FloatArray:
        """How long each row computes; both rows of a pair as long as the pair."""
        require_instance("plan", plan, Plan)
        table = np.zeros((len(Kind), plan.stages))
        for kind, name in _DURATION.items():
            table[kind] = self.of(name, plan.stages)
        rows = plan.rows
        duration = table[rows.kind, rows.stage]
        first, second = np.flatnonzero(rows.joined), np.flatnonzero(rows.second_of_pair())
        if self.overlap is None:
            pair = duration[first] + duration[second]
        else:
            pair = self.of("overlap", plan.stages)[rows.stage[first]]
        duration[first] = duration[second] = pair
        return duration

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as plain values."""
        changed = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        if "link" in changed:
            link = {"latency": self.link.latency, "bandwidth": self.link.bandwidth}
            if math.isinf(self.link.bandwidth):
                del link["bandwidth"]
            changed["link"] = link
        return changed

    @classmethod
    def from_timeline(cls, timeline: Timeline, *others: Timeline) -> Costs:
        """The costs that a timeline shows; of several timelines, the median.

        >>> from taktline.plan import build, simulate
        >>> timeline = simulate(build("zb_h1", ranks=2, microbatches=4), Costs(forward=3.0))
        >>> Costs.from_timeline(timeline).forward
        (3.0, 3.0)
        """
        return lazy_import("plan.calibrate").calibrate([timeline, *others])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """The reverse of :meth:`to_dict`."""
        known = sorted(field.name for field in fields(cls))
        require_instance("values", values, Mapping, "a dict", CostError)
        if unknown := [name for name in values if name not in known]:
            raise CostError(f"there is no cost {shown(unknown[0])}; known are {known}")
        values = dict(values)
        try:
            if "link" in values:
                values["link"] = Link(**values["link"])
            return cls(**values)
        except TypeError as error:
            raise CostError(f"costs cannot be read: {error}") from None


_DURATION = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
}
_PER_STAGE = (*_DURATION.values(), "overlap", "message_bytes", "activation", "kept_for_weight")
_BY_DEFAULT = {
    "backward": ("backward_input", "backward_weight"),
    "overlap": ("forward", "backward"),
    "kept_for_weight": ("activation",),
}
"""Those that are the sum of others where they are None."""
