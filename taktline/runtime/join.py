"""I and W of a split backward as one full backward, where nobody gains by waiting for W."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from taktline.plan import Kind
from taktline.runtime.executor import Instruction
from taktline.runtime.stage_actions import Work
from taktline.stage import PipelineStage

__all__ = ["join"]


def join(
    instructions: Sequence[Instruction],
    stages: Mapping[int, PipelineStage],
    works: Mapping[int, Work],
    *,
    alone: bool,
) -> list[Instruction]:
    """The same instructions with one full backward instead of I and W, where that is as good.

    That is where W follows its I at once, or if all ranks run here (``alone``). Gradients are added
    up in the order of before, and there is nothing to put aside.
    """
    found = dict(enumerate(instructions))
    places = {instruction.action: place for place, instruction in found.items()}
    halves: defaultdict[int, tuple[list[int | None], list[int | None]]]
    halves = defaultdict(lambda: ([], []))
    for action in places:  # the micro-batches of each stage, in the order of inputs and of weights
        if action.kind in (Kind.B, Kind.I):
            halves[action.stage][0].append(action.microbatch)
        if action.kind in (Kind.B, Kind.W):
            halves[action.stage][1].append(action.microbatch)
    for action, place in places.items():
        microbatch = action.microbatch
        if action.kind != Kind.W or microbatch is None or not stages[action.stage].may_join:
            continue
        first = places.get(replace(action, kind=Kind.I))
        inputs, weights = halves[action.stage]
        if first is not None and (first == place - 1 or (alone and inputs == weights)):
            whole = partial(works[action.stage].backward, microbatch)
            found[first] = replace(found[first], run=whole)
            del found[place]
    return list(found.values())
