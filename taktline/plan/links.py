"""How messages travel between ranks: one link for all, or different ones between hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, cast

import numpy as np

from taktline.checks import check, check_list, refuse
from taktline.errors import CostError
from taktline.plan.rows import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection between two ranks.

    >>> Link(latency=2.0)
    Link(latency=2.0, bandwidth=inf)
    """

    latency: float = 0.0
    """From the end of a send to its arrival, in the unit of time of the costs."""
    bandwidth: float = math.inf
    """Bytes in one unit of time. Messages of one channel go one after the other."""

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            number = getattr(self, name)
            if not (name == "bandwidth" and isinstance(number, float) and number == math.inf):
                number = check(name, number, float, least=0, error=CostError)
            object.__setattr__(self, name, number)
        if not self.bandwidth:
            raise CostError(f"bandwidth must be more than 0, not {self.bandwidth}")

    def between(self, sender: int, receiver: int) -> Link:
        """The link between two ranks, which is the same for all.

        >>> Link(latency=2.0).between(0, 5)
        Link(latency=2.0, bandwidth=inf)
        """
        return self

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as plain values."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


NO_TIME = Link()
"""Messages arrive at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Different links between ranks: within a host, along a rail, across hosts, and single ones.

    Ranks that have the same place in their hosts are on one rail. Links are the same both ways, and
    each channel has one of its own: hosts do not share theirs.

    ::

        host 0    host 1            2 ─▶ 3    within
        0 1 2 3   4 5 6 7           0 ─▶ 4    rail
                                    3 ─▶ 4    across

    >>> links = Links(ranks_per_host=4, across=Link(latency=2.0), pairs={(2, 3): Link(latency=9.0)})
    >>> [links.between(*pair).latency for pair in ((0, 1), (3, 2), (3, 4))]
    [0.0, 9.0, 2.0]
    """

    ranks_per_host: int
    """Ranks are numbered host after host."""
    within: Link = NO_TIME
    """Between two ranks of one host."""
    across: Link = NO_TIME
    """Between two ranks of different hosts."""
    rail: Link | None = None
    """Between two that have the same place in their hosts; by default as across."""
    pairs: Mapping[tuple[int, int], Link] | tuple[tuple[tuple[int, int], Link], ...] = ()
    """Single links in place of these, by pairs of ranks: a slow cable, say."""

    def __post_init__(self) -> None:
        check("ranks_per_host", self.ranks_per_host, int, least=1, error=CostError)
        for name in ("within", "across", "rail"):
            if name != "rail" or self.rail is not None:
                check(name, getattr(self, name), Link, error=CostError)
        known: dict[tuple[int, int], Link] = {}
        try:
            given = dict(self.pairs)
        except (TypeError, ValueError):
            refuse("pairs", "a dict from pairs of ranks to links", self.pairs, CostError)
        for pair, link in given.items():
            ranks = sorted(check_list("a pair of ranks", pair, int, error=CostError))
            if len(ranks) != 2 or ranks[0] == ranks[1] or ranks[0] < 0:
                refuse("a pair of ranks", "two different numbers from 0 up", pair, CostError)
            if (one := (ranks[0], ranks[1])) in known:
                raise CostError(f"the link between ranks {one[0]} and {one[1]} is given twice")
            known[one] = check(f"the link between ranks {pair}", link, Link, error=CostError)
        object.__setattr__(self, "pairs", tuple(sorted(known.items())))

    def between(self, sender: int, receiver: int) -> Link:
        """The link between two ranks."""
        pair = (min(sender, receiver), max(sender, receiver))
        hosts, places = zip(*(divmod(rank, self.ranks_per_host) for rank in pair), strict=True)
        by_place = self.across if self.rail is None or places[0] != places[1] else self.rail
        return self._single().get(pair, self.within if hosts[0] == hosts[1] else by_place)

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as plain values."""
        found: dict[str, Any] = {"ranks_per_host": self.ranks_per_host}
        for name in ("within", "across", "rail"):
            if (link := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                found[name] = link.to_dict()
        if self.pairs:
            found["pairs"] = [[*pair, link.to_dict()] for pair, link in self._single().items()]
        return found

    def _single(self) -> dict[tuple[int, int], Link]:
        return dict(cast(Any, self.pairs))


def from_dict(values: Any) -> Link | Links:
    """The reverse of ``to_dict``, of either."""
    given = dict(_fields("link", values))
    if "ranks_per_host" not in given:
        return Link(**given)
    for name in {"within", "across", "rail"} & given.keys():
        given[name] = _link(name, given[name])
    pairs: dict[tuple[Any, ...], Link] = {}
    for entry in check_list("pairs", given.pop("pairs", ()), list, error=CostError):
        *pair, link = entry or [None]
        pairs[tuple(pair)] = _link(f"the link between ranks {tuple(pair)}", link)
    return Links(**given, pairs=cast(Any, pairs))


def _link(name: str, values: object) -> Link:
    return Link(**_fields(name, values))


def _fields(name: str, values: object) -> dict[str, Any]:
    return cast(dict[str, Any], check(name, values, dict, error=CostError))


def over_boundaries(
    links: Link | Links, rank_of: tuple[int, ...], size: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """How long what a stage sends occupies its channel, and how long it then takes to arrive.

    There is a row for activations, to the next stage, and one for gradients, to the one before. A
    gradient is as large as its activation, which the stage before has sent. What stays on its rank
    takes no time.
    """
    occupies, latency = np.zeros((2, 2, len(rank_of)))
    for stage, (sender, receiver) in enumerate(pairwise(rank_of)):
        if sender != receiver:
            link = links.between(sender, receiver)
            occupies[0, stage] = occupies[1, stage + 1] = size[stage] / link.bandwidth
            latency[0, stage] = latency[1, stage + 1] = link.latency
    return occupies, latency
