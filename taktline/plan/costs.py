"""The cost of actions, in time and memory: given by the user, or estimated from timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from taktline.checks import check, check_one_of, refuse
from taktline.errors import CostError
from taktline.plan.action import COPIES, Kind
from taktline.plan.deps import needs
from taktline.plan.links import NO_TIME, Link, Links, from_dict, over_boundaries
from taktline.plan.plan import MOST_STAGES, Placement, Plan
from taktline.plan.rows import FloatArray, as_numbers, known_medians

if TYPE_CHECKING:
    from taktline.plan.timeline import Timeline

PerStage: TypeAlias = float | tuple[float, ...]
"""One number for all stages, or one for each."""


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
    recompute: PerStage | None = None
    """A forward that runs again; by default as long as a forward."""
    overlap: PerStage | None = None
    """An overlapped pair, by its forward's stage; by default its forward + its backward."""
    link: Link | Links = NO_TIME
    message_bytes: PerStage = 0.0
    """The bytes that a stage sends forward, and gets back as a gradient, for one micro-batch."""
    comm_blocks: bool = False
    """Whether a rank stops computing while it sends, instead of doing both at once."""
    activation: PerStage | None = None
    """The bytes that a forward keeps for the backward, for one micro-batch. If they are not known,
    memory counts micro-batches: the stages of a rank keep 1 together."""
    kept_for_weight: PerStage | None = None
    """The part of it, out of 1 if it is not known, that I leaves for W; by default all."""
    kept_for_recompute: PerStage = 0.0
    """What a forward keeps in place of the activation if it is recomputed."""
    offloadable: PerStage | None = None
    """The part of the activation that an OFFLOAD copies; by default all."""
    offload: PerStage | None = None
    """The copy of this part to the host, on the rank's engine; by default as long as a forward."""
    reload: PerStage | None = None
    """The copy back to the device; by default as long as that to the host."""
    unit: str = ""
    """The unit of time, for people: "ms", for example."""

    def __post_init__(self) -> None:
        for name in _PER_STAGE:
            value = getattr(self, name)
            if value is None and (name == "activation" or name in _BY_DEFAULT):
                continue
            numbers = as_numbers(value)
            if numbers is None or numbers.ndim > 1 or (numbers < 0).any():
                refuse(name, "a number from 0 up, or one for each stage", value, CostError)
            plain = tuple(map(float, numbers)) if numbers.ndim else float(numbers)
            object.__setattr__(self, name, plain)
        check("link", self.link, (Link, Links), "a Link or Links", error=CostError)
        check("comm_blocks", self.comm_blocks, bool, error=CostError)
        check("unit", self.unit, str, error=CostError)
        whole = np.atleast_1d(1.0 if self.activation is None else self.activation)
        for name in ("kept_for_weight", "kept_for_recompute", "offloadable"):
            part = np.atleast_1d(getattr(self, name) or 0.0)
            if (1 in (len(whole), len(part)) or len(whole) == len(part)) and (part > whole).any():
                raise CostError(f"{name} is a part of activation: it cannot be larger")

    def of(self, name: str, stages: int) -> FloatArray:
        """One of the per-stage costs as an array of ``stages`` numbers."""
        check_one_of("name", name, _PER_STAGE, error=CostError)
        stages = check("stages", stages, int, least=1, most=MOST_STAGES, error=CostError)
        value: PerStage | None = getattr(self, name)
        if value is None and name == "activation":
            value = 1.0
        if value is None:
            return np.sum([self.of(part, stages) for part in _BY_DEFAULT[name]], axis=0)
        if isinstance(value, tuple) and len(value) != stages:
            raise CostError(
                f"{name} is for {len(value)} stages, but the plan has {stages}; pass one number "
                "for all, or one for each"
            )
        return np.broadcast_to(np.asarray(value, np.float64), (stages,)).copy()

    @property
    def saves_memory(self) -> bool:
        """Whether they say what a copy to the host takes, or a forward that runs again."""
        return self.offload is not None or self.recompute is not None

    def saving(self, arrives: Sequence[float], bandwidth: float) -> Costs:
        """The same, with what saves memory: copies at a bandwidth, and forwards that run again.

        ``arrives`` are the bytes of each stage's arguments, which a RECOMPUTE needs.

        >>> Costs(activation=8.0).saving([2.0], bandwidth=4.0).offload
        (2.0,)
        """
        stages = len(arrives)
        keeps, again = self.of("activation", stages), self.of("forward", stages)
        kept = np.minimum(arrives, keeps)
        known: dict[str, Any] = {"recompute": tuple(again), "kept_for_recompute": tuple(kept)}
        return replace(self, offload=tuple(keeps / bandwidth), reload=None, **known)

    @property
    def memory_unit(self) -> str:
        """What memory counts: bytes, or whole micro-batches if ``activation`` is not known."""
        return "micro-batches" if self.activation is None else "bytes"

    def keeps(self, placement: Placement, part: str = "activation") -> FloatArray:
        """The activation of each stage for one micro-batch, or a part of it, in ``memory_unit``.

        >>> Costs().keeps(Placement.v(2)), Costs(activation=64).keeps(Placement.v(2))
        (array([0.5, 0.5, 0.5, 0.5]), array([64., 64., 64., 64.]))
        """
        found = self.of(part, placement.stages)
        if self.activation is None:
            found /= np.bincount(placement.rank_of)[list(placement.rank_of)]
        return found

    def durations(self, plan: Plan) -> FloatArray:
        """How long each row computes or copies; both rows of a pair as long as the pair."""
        check("plan", plan, Plan)
        table = np.zeros((len(Kind), plan.stages))
        for kind, name in (_DURATION | _COPY).items():
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

    def messages(self, placement: Placement) -> tuple[FloatArray, FloatArray]:
        """How long each stage's message occupies its channel, and then takes to arrive.

        Row 0 is for the activation that it sends, row 1 for the gradient.

        >>> Costs(link=Link(latency=2.0)).messages(Placement.linear(3))[1]
        array([[2., 2., 0.],
               [0., 2., 2.]])
        """
        check("placement", placement, Placement)
        size = self.of("message_bytes", placement.stages)
        return over_boundaries(self.link, placement.rank_of, size)

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as plain values."""
        changed = _changed(self)
        if "link" in changed:
            changed["link"] = self.link.to_dict()
        return changed

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Costs:
        """The reverse of :meth:`to_dict`."""
        check("values", values, Mapping, "a dict", error=CostError)
        try:
            given: dict[str, Any] = {**values, "link": from_dict(values.get("link", {}))}
            return cls(**given)
        except TypeError as error:
            raise CostError(str(error)) from None

    @classmethod
    def from_timeline(cls, timeline: Timeline, *others: Timeline) -> Costs:
        """The costs that a timeline shows; of several timelines, the median.

        The cost of a stage is the mean over its micro-batches, so that the sum is the time that its
        rank spent on them. An action costs the time from when it could have begun, its rank being
        free and its inputs there, until its end; so it includes messages in between::

            rank 0 │ 0F0─── SEND  0F1───
                   │       └──────────── cost of 0F1

        A message costs one latency, whatever its size. If the plans have no I and W, these share
        the time of a backward as in the other stages, or equally; without any backward, each takes
        as long as a forward.

        >>> from taktline.plan import build, simulate
        >>> timeline = simulate(build("zb_h1", ranks=2, microbatches=4), Costs(forward=3.0))
        >>> Costs.from_timeline(timeline).forward
        (3.0, 3.0)
        """
        timelines = [timeline, *others]
        for each in timelines:
            if not isinstance(getattr(each, "costs", None), Costs):
                refuse("timeline", "a Timeline", each)
        if len({(each.plan.stages, each.costs.unit) for each in timelines}) > 1:
            raise CostError(
                "costs need timelines of one model, with equal numbers of stages, in one unit"
            )
        if any(each.plan.rows.joined.any() for each in timelines):
            raise CostError(
                "an overlapped pair does not show what its halves cost; a measured timeline has "
                "none, and a simulated one has costs already"
            )
        means = np.stack([_means(each) for each in timelines])
        medians = list[FloatArray](known_medians(means, axis=0))
        forward, again, full, inputs, weights, *copies = medians
        with np.errstate(invalid="ignore"):  # both halves may take no time
            share = _filled(inputs / (inputs + weights), np.full_like(full, 0.5))
        inputs = _filled(np.where(np.isnan(inputs), share * full, inputs), forward)
        weights = _filled(np.where(np.isnan(weights), (1 - share) * full, weights), forward)
        backward = np.where(np.isnan(full), inputs + weights, full)
        of_memory = {
            name: None if np.isnan(found).all() else tuple(_filled(found, found))
            for name, found in zip(("recompute", *_COPY.values()), (again, *copies), strict=True)
        }
        flights = [flight.mean() for each in timelines if len(flight := _flights(each))]
        return replace(
            timeline.costs,
            forward=tuple(forward),
            backward_input=tuple(inputs),
            backward_weight=tuple(weights),
            backward=None if np.isnan(full).all() else tuple(backward),
            overlap=None,
            link=Link(latency=max(0.0, float(np.median(flights))) if flights else 0.0),
            message_bytes=0.0,
            **of_memory,
        )


_DURATION = {
    Kind.F: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
}
_COPY = dict(zip(COPIES, ("offload", "reload"), strict=True))
_PER_STAGE = (
    *(*_DURATION.values(), *_COPY.values(), "overlap", "message_bytes"),
    *("activation", "kept_for_weight", "kept_for_recompute", "offloadable"),
)
_BY_DEFAULT = {
    "recompute": ("forward",),
    "backward": ("backward_input", "backward_weight"),
    "overlap": ("forward", "backward"),
    "kept_for_weight": ("activation",),
    "offloadable": ("activation",),
    "offload": ("forward",),
    "reload": ("offload",),
}
"""Those that are the sum of others where they are None."""


def _changed(costs: Costs) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    values = [(field, getattr(costs, field.name)) for field in fields(costs)]
    return {field.name: value for field, value in values if value != field.default}


def _means(timeline: Timeline) -> FloatArray:
    """A row for each kind that computes or copies, with the mean cost at each stage, or nan."""
    plan, rows, rank = timeline.plan, timeline.plan.rows, timeline.plan.rank_of_rows()
    at, needed = np.flatnonzero(rows.kind <= Kind.W), needs(plan)
    lane = at
    if timeline.costs.comm_blocks:  # a send has its own time
        lane = np.flatnonzero(~np.isin(rows.kind, COPIES))
    before = lane[np.maximum(np.searchsorted(lane, at) - 1, 0)]
    first = (rank[before] != rank[at]) | (before == at)
    ready = np.where(first, timeline.start[at], timeline.end[before])
    for source in (needed.waits[at], needed.copy[at]):
        ready = np.where(source >= 0, np.maximum(ready, timeline.arrivals[source]), ready)
    cost = timeline.end - timeline.start
    # Clocks differ a little, so a message may seem to arrive after its receiver has started.
    cost[at] = timeline.end[at] - np.minimum(ready, timeline.start[at])
    shown, kinds = np.flatnonzero(rows.kind <= Kind.RELOAD), Kind.RELOAD + 1
    place, cost = rows.kind[shown] * plan.stages + rows.stage[shown], cost[shown]
    total, count = (np.bincount(place, w, minlength=kinds * plan.stages) for w in (cost, None))
    with np.errstate(invalid="ignore"):
        return (total / count).reshape(kinds, plan.stages)


def _flights(timeline: Timeline) -> FloatArray:
    """How long each message took: from when it could leave until it was there."""
    waits = needs(timeline.plan).waits
    sends = waits[waits >= 0]
    # A send may come long after its action: behind the other half of a pair, for one.
    spelled_out = timeline.plan.rows.kind[sends] > Kind.W
    leaves = np.where(spelled_out, timeline.start[sends], timeline.end[sends])
    return timeline.arrivals[sends] - leaves


def _filled(values: FloatArray, otherwise: FloatArray) -> FloatArray:
    """What is unknown is the median of the rest, or as ``otherwise`` if nothing is known."""
    unknown = np.isnan(values)
    return otherwise if unknown.all() else np.where(unknown, np.median(values[~unknown]), values)
