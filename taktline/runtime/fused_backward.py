"""Quicker programs with the same gradients, for stages that run in one thread.

``join`` replaces I and W by one full backward. ``plain_loop`` runs micro-batch by micro-batch, with
one backward of all stages: no rank waits for another there, so the schedule's order gains nothing,
and a step costs as much as a plain accumulation loop::

    rank 0   F0           B0 │ F1           B1 │
    rank 1      F0     B0    │    F1     B1    │ …
    rank 2         F0 B0     │       F1 B1     │
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from taktline.plan import Kind
from taktline.runtime.ports import Handback
from taktline.runtime.program import Instruction
from taktline.runtime.stage_actions import OwnLosses, Work, uncast
from taktline.side_values import Aside, Replay, opened
from taktline.stage import PipelineStage
from taktline.stage.autograd_engine import accumulate
from taktline.stage.names import parameters_of


def join(
    instructions: Sequence[Instruction],
    stages: Mapping[int, PipelineStage],
    works: Mapping[int, Work],
    *,
    alone: bool,
) -> list[Instruction]:
    """The same instructions with one full backward instead of I and W, where nothing is lost.

    That is where W follows its I at once, or if all ranks run here (``alone``) and gradients are
    added up in the same order.
    """
    sharing = _sharing(stages)
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
        may_move = alone and inputs == weights and action.stage not in sharing
        if first is not None and (first == place - 1 or may_move):
            whole = partial(works[action.stage].backward, microbatch)
            found[first] = replace(found[first], run=whole)
            del found[place]
    return list(found.values())


def plain_loop(
    instructions: Sequence[Instruction],
    stages: Mapping[int, PipelineStage],
    make_work: Callable[..., Work],
    *,
    any_order: bool = False,
) -> list[Instruction] | None:
    """The same instructions as a plain loop; None if gradients could differ.

    That is so for a weight of two stages: the loop would add its gradients in another order than
    a first step, which a resumed run begins with, or a traced one. ``make_work(stage, joined=…,
    ports…)`` makes the work of a stage. Forwards keep their order, unless ``any_order`` will do.
    """
    order = _order(instructions, any_order)
    if order is None or _sharing(stages) or not all(stage.may_join for stage in stages.values()):
        return None
    actions = {
        (each.action.stage, each.action.microbatch, each.action.kind == Kind.F): each.action
        for each in instructions
        if each.action.kind != Kind.W
    }
    last = len(stages) - 1
    backward = _Backward(last, stages[last].device.type)
    handed_on = [None, *(Handback() for _ in range(last)), None]
    works = [
        make_work(
            stage,
            joined=backward.keep,
            activations_in=handed_on[stage],
            activations_out=handed_on[stage + 1],
        )
        for stage in range(last + 1)
    ]
    loop: list[Instruction] = []
    for m in order:
        for stage, work in enumerate(works):
            loop.append(Instruction(actions[stage, m, True], partial(work.forward, m), None))
        back = [actions[stage, m, False] for stage in range(last + 1)]
        loop.append(
            Instruction(back[-1], backward.run, None, at=lambda back=back: back[backward.stage])
        )
    return loop


def _sharing(stages: Mapping[int, PipelineStage]) -> set[int]:
    """The stages that train a weight in common with another one."""
    users: defaultdict[int, set[int]] = defaultdict(set)
    for index, stage in stages.items():
        for weight in parameters_of(stage.submod):
            if weight.requires_grad:
                users[id(weight)].add(index)
    return set().union(*(found for found in users.values() if len(found) > 1))


def _order(instructions: Sequence[Instruction], any_order: bool) -> list[int] | None:
    """The order in which all stages compute and add up micro-batches; None if they differ.

    With ``any_order``, that in which they add up.
    """
    orders: defaultdict[tuple[int, bool], list[int | None]] = defaultdict(list)
    for each in instructions:
        action = each.action
        if action.microbatch is None:
            return None
        if action.kind != Kind.I and not (any_order and action.kind == Kind.F):
            orders[action.stage, action.kind == Kind.F].append(action.microbatch)
    first, *others = orders.values()
    return [m for m in first if m is not None] if all(each == first for each in others) else None


class _Backward:
    """The backward of a micro-batch through all stages, as one call.

    Autograd runs the last computation first, so it goes from stage to stage. Hooks on the outputs
    of each stage note where it is.
    """

    def __init__(self, last: int, device_type: str) -> None:
        self._last = last
        self._device_type = device_type
        self._at = [last]
        self._marks = [_Mark(self._at, stage) for stage in range(last + 1)]
        self._roots: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._asides: dict[int, Aside] = {}

    @property
    def stage(self) -> int:
        """The stage that is running."""
        return self._at[0]

    def keep(self, stage: int, results: Sequence[Any], own: OwnLosses, aside: Aside | None) -> None:
        """Keep the results of a forward for the backward."""
        mark = self._marks[stage]
        for value in opened(results)[0]:
            _note(mark, value)
        for loss, gradient in zip(*own, strict=True):
            if gradient is not None:
                self._roots.append(loss)
                self._gradients.append(gradient)
        if aside is not None:
            put = [skip.value for skip in aside.skips.values() if skip.stage == stage]
            _note(mark, (put, aside.losses))
            aside.replays = True
            self._asides[stage] = aside

    def run(self) -> None:
        """Add up the gradients of all stages."""
        roots, gradients, asides = self._roots, self._gradients, self._asides
        self._roots, self._gradients, self._asides, self._at[0] = [], [], {}, self._last
        if asides:
            with Replay(lambda: asides.get(self.stage) or Aside(self.stage, {})):
                uncast(self._device_type, accumulate, roots, gradients)
        elif roots:
            uncast(self._device_type, accumulate, roots, gradients)


def _note(mark: _Mark, tree: Any) -> None:
    """Put a mark on the nodes of all tensors in a tree."""
    if isinstance(tree, torch.Tensor):
        if (node := tree.grad_fn) is not None:
            mark(node)
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            _note(mark, part)
    elif isinstance(tree, dict):
        _note(mark, list(tree.values()))


class _Mark:
    """Notes that the backward has come to a stage: a hook for many nodes of its graph."""

    def __init__(self, at: list[int], stage: int) -> None:
        self._at = at
        self._stage = stage
        self._hooks = torch.empty(0)
        self._hooks._backward_hooks = {0: self._come}

    def __call__(self, node: Any) -> None:
        """Hook a node; without the private way, which is quicker, by a hook of its own."""
        share = getattr(node, "_register_hook_dict", None)
        if share is not None:
            share(self._hooks)
        else:
            node.register_prehook(self._come)

    def _come(self, _: object) -> None:
        self._at[0] = self._stage
