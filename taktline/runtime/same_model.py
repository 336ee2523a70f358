"""Compares the blueprints of ranks: a digest of each, and the details of two that differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from taktline.errors import MismatchError
from taktline.runtime.fingerprint import digest_of
from taktline.stage import PipelineStage
from taktline.stage.blueprint import PLACE, TOPICS, Blueprint, attached
from taktline.transport import Transport
from taktline.transport.exchange import share_values


def digest(mine: Blueprint) -> int:
    """A number for a blueprint; 0 for an empty one, which fits all others."""
    return digest_of(text for entry in mine for text in entry) | 1 if mine else 0


def whole_model(stages: Sequence[PipelineStage]) -> Blueprint:
    """The blueprint of the model that stages were cut from; empty if it is not known."""
    found = {stage.stage_index: whole for stage in stages if (whole := attached(stage.submod))}
    for stage, whole in found.items():
        if whole != next(iter(found.values())):
            raise MismatchError(
                f"stages {next(iter(found))} and {stage} of this rank were cut from different "
                "models, or at different places; take all stages from one split"
            )
    return next(iter(found.values()), ())


def difference(
    transport: Transport,
    mine: Blueprint,
    digests: Sequence[int],
    *,
    rank_of: Sequence[int] = (),
    noun: str = "rank",
) -> str | None:
    """The first difference between the blueprints of two ranks; None if all are the same.

    All ranks take part, and return the same. ``rank_of`` has the rank of each stage.
    """
    counts = Counter(number for number in digests if number)
    if len(counts) < 2:
        return None
    ((most, _),) = counts.most_common(1)  # the first of several
    other = next(number for number in digests if number not in (0, most))
    # Only one rank for each sends its own: those of a thousand ranks would take too long.
    ranks = [digests.index(number) for number in (most, other)]
    told = list(mine) if transport.rank in ranks else []
    shared = share_values(transport, told, [(str, str, str)], "the models of ranks", what="these")
    sides = [
        _Side(
            f"{noun} {rank}",
            {(topic, name): text for topic, name, text in shared[rank]},
            {place for place, number in enumerate(digests) if number == digests[rank]},
        )
        for rank in ranks
    ]
    found = _compared(sides[0], sides[1], rank_of)
    return (
        f"the {noun}s do not build the same pipeline: {found}; build the same model with the same "
        f"options and cuts on every {noun}"
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """One of two blueprints that differ."""

    where: str
    texts: dict[tuple[str, str], str]
    ranks: set[int]
    """All ranks with this blueprint."""

    def holders(self, name: str, rank_of: Sequence[int]) -> set[int]:
        """The ranks among these that would hold a tensor."""
        stages = map(int, re.findall(r"\d+", self.texts.get((PLACE, name), "")))
        return {rank_of[stage] for stage in stages if stage < len(rank_of)} & self.ranks


def _compared(one: _Side, other: _Side, rank_of: Sequence[int]) -> str:
    """The first difference, in words."""
    keys = sorted({**one.texts, **other.texts}, key=lambda key: TOPICS.index(key[0]))
    different = [key for key in keys if one.texts.get(key) != other.texts.get(key)]
    if not different:
        return f"tensors or modules are in another order on {other.where} than on {one.where}"
    topic, name = different[0]
    if topic == PLACE:
        return _misplaced(
            one, other, [name for topic, name in different if topic == PLACE], rank_of
        )
    texts = [side.texts.get((topic, name)) for side in (one, other)]
    if None in texts:
        there, missing = (one, other) if texts[1] is None else (other, one)
        text = there.texts[topic, name]
        return f"{missing.where} has no {topic} {name}, which is {text} on {there.where}"
    return f"{topic} {name} is {texts[0]} on {one.where}, but {texts[1]} on {other.where}"


def _misplaced(one: _Side, other: _Side, names: Sequence[str], rank_of: Sequence[int]) -> str:
    """Of the tensors that are in different stages, one that is on no rank or on several."""
    held = {name: one.holders(name, rank_of) | other.holders(name, rank_of) for name in names}
    name = next((name for name in names if len(held[name]) != 1), names[0])
    first, second = (side.texts.get((PLACE, name), "no stage") for side in (one, other))
    told = f"{name} is in {first} on {one.where}, but in {second} on {other.where}"
    if not rank_of or len(held[name]) == 1:
        return told
    if held[name]:
        return f"{told}, so that it would be on ranks {', '.join(map(str, sorted(held[name])))}"
    return f"{told}, so that it would be on no rank"
