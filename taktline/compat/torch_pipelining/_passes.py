"""One rank's order, made ready to run: backwards joined, shards gathered, gradients reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from taktline.compat.torch_pipelining._action import (
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    B,
    I,
    W,
    _Action,
    _ComputationType,
)

__all__ = ["_add_reduce_grad", "_add_unshard_reshard", "_merge_bw", "_requires_reduce_grad"]


def parts(action: _Action) -> Sequence[_Action]:
    """What is run at once in an overlap; any other action is its only part."""
    return (action,) if action.sub_actions is None else action.sub_actions


def _merge_bw(compute_actions: list[_Action | None]) -> list[_Action]:
    """Replace each I that is directly followed by its own W with one B. Empties what it is given.

    >>> _merge_bw([_Action(0, I, 0), None, _Action(0, W, 0), _Action(0, I, 1)])
    [0B0, 0I1]
    """
    merged: list[_Action] = []
    for action in compute_actions:
        if action is None:
            continue
        before = merged[-1] if merged else None
        if action.computation_type == W and before == action._replace(computation_type=I):
            merged[-1] = action._replace(computation_type=B)
        else:
            merged.append(action)
    compute_actions.clear()
    return merged


def _add_unshard_reshard(
    compute_actions: list[_Action | None], max_active_stages: int = 3
) -> list[_Action]:
    """Gather the stages that are in use next, so many of them, and release all others.

    >>> from taktline.compat.torch_pipelining._action import F
    >>> _add_unshard_reshard([_Action(0, F, 0), _Action(1, F, 0), None], max_active_stages=1)
    [0UNSHARD, 0F0, 0RESHARD, 1UNSHARD, 1F0, 1RESHARD]
    """
    actions = [action for action in compute_actions if action is not None]
    result: list[_Action] = []
    held: set[int] = set()
    for place, action in enumerate(actions):
        wanted = _next_stages(actions[place:], max_active_stages)
        for stage in [stage for stage in held if stage not in wanted]:
            result.append(_Action(stage, RESHARD))
            held.remove(stage)
        for stage in [stage for stage in wanted if stage not in held]:
            result.append(_Action(stage, UNSHARD))
            held.add(stage)
        result.append(action)
    return result + [_Action(stage, RESHARD) for stage in held]


def _next_stages(actions: Iterable[_Action], count: int) -> list[int]:
    """The stages in use next, in this order; all stages of an overlap are needed at once."""
    stages: dict[int, None] = {}
    for action in actions:
        stages.update(dict.fromkeys(part.stage_index for part in parts(action)))
        if len(stages) >= count:
            break
    return list(stages)


def _requires_reduce_grad(action_type: _ComputationType) -> bool:
    """Whether it adds to the gradients of weights.

    >>> _requires_reduce_grad(W), _requires_reduce_grad(I)
    (True, False)
    """
    return action_type in (B, W)


def _add_reduce_grad(actions: list[_Action | None], n_microbatches: int) -> list[_Action | None]:
    """Add REDUCE_GRAD behind the backward with which a stage has all its gradients.

    >>> _add_reduce_grad([_Action(0, B, 0), None, _Action(0, B, 1), _Action(1, B, 0)], 2)
    [0B0, 0B1, 0REDUCE_GRAD, 1B0]
    """
    done: Counter[int] = Counter()
    result: list[_Action | None] = []
    for action in actions:
        if action is None:
            continue
        result.append(action)
        for part in parts(action):
            if _requires_reduce_grad(part.computation_type):
                done[part.stage_index] += 1
                if done[part.stage_index] == n_microbatches:
                    result.append(_Action(part.stage_index, REDUCE_GRAD))
    return result
