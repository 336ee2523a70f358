"""Micro-batch by micro-batch through all stages, where these run in one thread.

No rank waits for another there, so nobody gains by the order of the schedule. One forward and one
backward of all stages cost what they cost in a plain accumulation loop::

    rank 0   F0           B0 │ F1           B1 │
    rank 1      F0     B0    │    F1     B1    │ …
    rank 2         F0 B0     │       F1 B1     │
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from taktline.plan import Kind
from taktline.runtime.executor import Instruction
from taktline.runtime.ports import Handback
from taktline.runtime.stage_actions import Own, Work, uncast
from taktline.side_values import Aside, Replay, opened
from taktline.stage import PipelineStage
from taktline.stage.engine import accumulate

__all__ = ["plain_loop"]


def plain_loop(
    instructions: Sequence[Instruction],
    stages: Mapping[int, PipelineStage],
    make_work: Callable[..., Work],
) -> list[Instruction] | None:
    """The same as a plain loop; None if gradients could differ, or if others have a say in them.

    ``make_work(stage, joined=…, ports…)`` makes the work of a stage.
    """
    order = _order(instructions)
    if order is None or not all(stage.may_join for stage in stages.values()):
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


def _order(instructions: Sequence[Instruction]) -> list[int] | None:
    """In which order every stage computes and adds up gradients of micro-batches, if it is one."""
    orders: defaultdict[tuple[int, bool], list[int | None]] = defaultdict(list)
    for each in instructions:
        action = each.action
        if action.microbatch is None:
            return None
        if action.kind != Kind.I:
            orders[action.stage, action.kind == Kind.F].append(action.microbatch)
    first, *others = orders.values()
    return [m for m in first if m is not None] if all(each == first for each in others) else None


class _Backward:
    """The backward of a micro-batch through all stages, as one call.

    Autograd runs what was computed last first, so it goes from stage to stage. Where it is, hooks
    note at all that leaves a stage.
    """

    def __init__(self, last: int, device_type: str) -> None:
        self._last = last
        self._device_type = device_type
        self._at = [last]
        self._marks = [_mark(self._at, stage) for stage in range(last + 1)]
        self._roots: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._asides: dict[int, Aside] = {}

    @property
    def stage(self) -> int:
        """Where it is."""
        return self._at[0]

    def keep(self, stage: int, results: Sequence[Any], own: Own, aside: Aside | None) -> None:
        """Note what a forward has left for the backward."""
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


def _note(mark: torch.Tensor, tree: Any) -> None:
    """Let a backward note that it comes to what is in a tree."""
    if isinstance(tree, torch.Tensor):
        if (node := tree.grad_fn) is not None:
            node._register_hook_dict(mark)
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            _note(mark, part)
    elif isinstance(tree, dict):
        _note(mark, list(tree.values()))


def _mark(at: list[int], stage: int) -> torch.Tensor:
    """What nodes of autograd take a hook from, which notes that the backward is at a stage.

    ``Tensor.register_hook`` would take as long as a small layer.
    """

    def come(_: torch.Tensor) -> None:
        at[0] = stage

    mark = torch.empty(0)
    mark._backward_hooks = {0: come}
    return mark
