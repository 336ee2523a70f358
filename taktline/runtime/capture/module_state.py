"""The state of modules that a forward and a backward read, and a replay would not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import nn

from taktline import pytree
from taktline.private import lacking, missing, private
from taktline.sharding import is_sharded, local
from taktline.stage import PipelineStage
from taktline.stage.autograd_engine import is_own_hook
from taktline.stage.names import parameters_of

Attribute: TypeAlias = tuple[ref[nn.Module], str]
"""An attribute of a module: the module, and the name."""

_OWN = frozenset(vars(nn.Module()))
"""The attributes of every module; what matters of them is looked at by itself."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_WHAT = "a CUDA graph of a step"
_has_global_hook = private("torch.nn.modules.module._has_any_global_hook", _WHAT)
_count_modes = private("torch._C._len_torch_dispatch_stack", _WHAT)
_UNSEEN = missing(_has_global_hook, _count_modes) or lacking(
    torch.Tensor, "_is_view", "_version", feature=_WHAT
)
_LONG, _DEEP = 64, 2
"""The most values in a container that are compared, and the most containers around it."""


def state_of(
    stages: Sequence[PipelineStage],
    loss_fn: Callable[..., Any] | None = None,
    changing: Collection[Attribute] = (),
) -> tuple[object, ...] | str:
    """Modes, parameters, buffers and attributes of modules; or why there can be no graph.

    A graph is right as long as this stays the same. Attributes that are ``changing`` in every
    forward are left out.
    """
    if _UNSEEN is not None:
        return _UNSEEN
    if _has_global_hook():
        return "there are hooks on all modules, which a replay would not call"
    if _count_modes():
        return "a mode of PyTorch sees each operation, but none of a replay"
    parts: list[list[object]] = []
    for stage in stages:
        parts.append([])
        reason = _note(stage.submod, parts[-1], changing)
        if stage.grad_sync is not None:
            reason = "it is wrapped in DDP or FSDP, which decide in Python what to send"
        if reason is not None:
            return f"stage {stage.stage_index}: {reason}"
    if (loss := _module_of(loss_fn)) is not None:
        parts.append([])
        reason = _note(loss, parts[-1], changing)
        trained = {p for p in loss.parameters() if p.requires_grad}
        if trained.difference(*(parameters_of(stage.submod) for stage in stages)):
            reason = "it has parameters of its own; make them part of the last stage"
        if reason is not None:
            return f"loss_fn: {reason}"
    return (
        *parts,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def difference(stages: Sequence[PipelineStage], before: object, now: object) -> str:
    """The first attribute in which two states differ, with its stage, in words."""
    if isinstance(before, tuple) and isinstance(now, tuple):
        owners = [*(f"stage {stage.stage_index}" for stage in stages), "loss_fn"]
        for owner, old, new in zip(owners, before, now, strict=False):
            if old != new and isinstance(old, list) and isinstance(new, list):
                pairs = zip(old, new, strict=False)
                names = [b[0] for a, b in pairs if a != b and isinstance(b, tuple)]
                return f"{owner}: {repr(names[0]) if names else 'something'} of its modules"
    return "something in its modules"


def _module_of(loss_fn: Callable[..., Any] | None) -> nn.Module | None:
    """The module that a loss function is, or is a method or partial call of."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    owner = getattr(loss_fn, "__self__", loss_fn)
    return owner if isinstance(owner, nn.Module) else None


def _modules(
    stages: Sequence[PipelineStage], loss_fn: Callable[..., Any] | None
) -> list[nn.Module]:
    found = [module for stage in stages for module in stage.submod.modules()]
    loss = _module_of(loss_fn)
    return found if loss is None else [*found, *loss.modules()]


def keep_state(
    stages: Sequence[PipelineStage], loss_fn: Callable[..., Any] | None = None
) -> Callable[[], None]:
    """Keep the attributes of modules; returns a function that restores them.

    For a failed capture, whose forward leaves values that were never computed.
    """
    modules = _modules(stages, loss_fn)
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

    def __init__(
        self, stages: Sequence[PipelineStage], loss_fn: Callable[..., Any] | None = None
    ) -> None:
        self._modules = _modules(stages, loss_fn)
        self._tensors = self._found()
        self._versions = _versions(self._tensors)
        self._attributes = self._noted()

    def have_changed(self) -> bool:
        """Whether one of them was written to, or is another tensor now."""
        now = self._found()
        same = list(map(id, self._tensors)) == list(map(id, now))
        return not same or _versions(now) != self._versions

    def changed_attributes(self) -> list[Attribute]:
        """The attributes that have changed, come or gone, in the order of modules and names."""
        before, now = self._attributes, self._noted()
        return [key for key in before | now if before.get(key) != now.get(key)]

    def _noted(self) -> dict[Attribute, tuple[object]]:
        # In a tuple, to distinguish None from no value.
        return {
            (ref(module), name): (value,)
            for module in self._modules
            for name, value in sorted(_attributes(module), key=itemgetter(0))
        }

    def _found(self) -> list[torch.Tensor]:
        buffers = [buffer for module in self._modules for buffer in module._buffers.values()]
        added = [vars(module)[name] for module in self._modules for name in _added(module)]
        return _tensors((buffers, added))


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Is:
    """Equal to the same object only, which is kept, so that no other one gets its id."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and self._value is other._value

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _attributes(module: nn.Module) -> list[tuple[str, object]]:
    """What a class has added to a module, such as the p of a dropout, to be compared by ``==``."""
    return [(name, _comparable(vars(module)[name])) for name in _added(module)]


def _added(module: nn.Module) -> set[str]:
    return vars(module).keys() - _OWN


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _comparable(value: Any, depth: int = 0) -> object:
    """A value to be compared by ``==``; long or deep containers are by identity only."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _Is(value), _place(value) if value.layout == torch.strided else 0
    if kind not in (list, tuple, dict) or len(value) > _LONG or depth > _DEEP:
        return _Is(value)
    parts = chain(*value.items()) if kind is dict else value
    return tuple(_comparable(part, depth + 1) for part in parts)


def _note(stage: nn.Module, found: list[object], changing: Collection[Attribute]) -> str | None:
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
        own, weak = _attributes(module), ref(module)
        found += [each for each in own if (weak, each[0]) not in changing]
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
