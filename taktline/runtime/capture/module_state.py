"""The state of modules that a forward and a backward read, and a replay would not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from taktline.sharding import is_sharded, local
from taktline.stage import PipelineStage
from taktline.stage.autograd_engine import is_own_hook

__all__ = ["Kept", "keep_state", "state_of"]


def state_of(stages: Sequence[PipelineStage]) -> tuple[object, ...] | str:
    """Modes, parameters and buffers with their addresses; or why there can be no graph.

    A graph is right as long as this stays the same.
    """
    if _has_any_global_hook():
        return "there are hooks on all modules, which a replay would not call"
    if torch._C._len_torch_dispatch_stack():
        return "a mode of PyTorch looks at each operation, which a replay would not show it"
    found: list[object] = [
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    ]
    for stage in stages:
        reason = _note(stage.submod, found)
        if stage.grad_sync is not None:
            reason = "it is wrapped in DDP or FSDP, which decide in Python what to send"
        if reason is not None:
            return f"stage {stage.stage_index}: {reason}"
    return tuple(found)


def keep_state(stages: Sequence[PipelineStage]) -> Callable[[], None]:
    """Keep the attributes of modules; returns a function that restores them.

    For a failed capture, whose forward leaves values that were never computed.
    """
    modules = [module for stage in stages for module in stage.submod.modules()]
    had = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]

    def restore() -> None:
        for stage in stages:
            stage.clear()
        for module, attributes, buffers in had:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.update(buffers)

    return restore


class Kept:
    """The tensors that modules keep from one micro-batch to the next: buffers and attributes.

    >>> norm = nn.BatchNorm1d(2)
    >>> kept = Kept([PipelineStage(norm, 0, 1, torch.device("cpu"))])
    >>> _ = norm(torch.ones(3, 2))
    >>> kept.have_changed()
    True
    """

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._modules = [module for stage in stages for module in stage.submod.modules()]
        self._tensors = self._found()
        self._versions = _versions(self._tensors)

    def have_changed(self) -> bool:
        """Whether one of them was written to, or is another tensor now."""
        now = self._found()
        same = list(map(id, self._tensors)) == list(map(id, now))
        return not same or _versions(now) != self._versions

    def _found(self) -> list[torch.Tensor]:
        values = (chain(each._buffers.values(), vars(each).values()) for each in self._modules)
        return [value for value in chain(*values) if isinstance(value, torch.Tensor)]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _note(stage: nn.Module, found: list[object]) -> str | None:
    """Collect the state of a stage; returns why it cannot be captured, or None."""
    waiting = [stage]
    seen: set[int] = set()
    while waiting:  # not by modules(), which takes several times as long
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        waiting += [child for child in module._modules.values() if child is not None]
        found += (id(module), module.training)
        if _is_hooked(module):
            return f"its module {type(module).__name__} has hooks, which a replay would not call"
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return f"its parameter {name!r} has hooks, which a replay would not call"
            found += (id(parameter), parameter.requires_grad, _place(parameter))
        for buffer in module._buffers.values():
            if buffer is not None:
                found.append(_place(buffer))
    return None


def _place(tensor: torch.Tensor) -> int:
    """The address of this rank's part of a tensor."""
    return (local(tensor.detach()) if is_sharded(tensor) else tensor).data_ptr()


def _is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks of the user; our own do the same every time."""
    forward, before = module._forward_hooks, module._forward_pre_hooks
    backward, before_it = module._backward_hooks, module._backward_pre_hooks
    if not (forward or before or backward or before_it):
        return False  # most have none
    hooks = chain(forward.values(), before.values(), backward.values(), before_it.values())
    return not all(map(is_own_hook, hooks))
