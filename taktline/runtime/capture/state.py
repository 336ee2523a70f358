"""The state of modules that an eager step reads, and a replay does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import ne
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taktline.meta import is_sharded, local
from taktline.private import lacking, missing, private
from taktline.stage import PipelineStage
from taktline.stage.split_backward import is_own_hook
from taktline.stage.stage import is_usual, parameters_of

_OWN = frozenset(vars(nn.Module()))
"""The attributes of every module; what matters of them is looked at by itself."""
_OF_FSDP = "__composable_api"
"""How FSDP's attributes of a module begin: they change in each step, as a plan says."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_CLOSED = (nn.Module, type, FunctionType, MethodType, ModuleType)
"""Objects that are not looked into."""
_WHAT = "a CUDA graph of a step"
_has_global_hook = private("torch.nn.modules.module._has_any_global_hook", _WHAT)
_count_modes = private("torch._C._len_torch_dispatch_stack", _WHAT)
count_users = private("torch._C._storage_Use_Count", _WHAT)
"""How many tensors have a storage, and Python's object for it."""
_UNSEEN = missing(_has_global_hook, _count_modes, count_users) or lacking(
    torch.Tensor, "_version", feature=_WHAT
)
_LONG, _DEEP, _DEEPEST = 64, 3, 6
"""The most values in a container that are compared before a step, and the most containers around
them, then and in a warm-up."""


class State:
    """Modes, parameters, buffers and attributes of modules: a graph is right while they stay.

    With ``deep``, long containers and all other objects are looked into, too: to find what a
    forward changes.

    >>> norm = nn.BatchNorm1d(2)
    >>> stages = [PipelineStage(norm, 0, 1, torch.device("cpu"))]
    >>> before = State(stages, deep=True)
    >>> _ = norm(torch.ones(3, 2))
    >>> now = State(stages, deep=True)
    >>> before.difference(now), before.versions == now.versions
    (None, False)
    >>> norm.eps = 0.1
    >>> now.difference(State(stages, deep=True))
    "stage 0: 'eps'"
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        loss_fn: Callable[..., Any] | None = None,
        *,
        deep: bool = False,
    ) -> None:
        self.refusal = _UNSEEN
        """Why there can be no graph; None if there can."""
        self.versions: list[int] = []
        """With ``deep``: how often each tensor was changed in place."""
        self._found: list[tuple[str, int, object]] = []
        """Names, with what is compared by identity and by value."""
        self._objects: list[object] = []
        """Those that are compared by identity: another one gets no place of theirs."""
        self._deep = deep
        self._seen: set[int] = set()
        self._device = stages[0].device.type if stages else ""
        self._roots = {f"stage {stage.stage_index}": stage.submod for stage in stages}
        if self.refusal is None and _has_global_hook():
            self.refusal = "there are hooks on all modules, which a replay would not call"
        elif self.refusal is None and _count_modes():
            self.refusal = "a mode of PyTorch sees each operation, but none of a replay"
        for root, stage in zip(self._roots, stages, strict=True):
            if not is_usual(stage):
                self._refuse(root, "it has a backward of its own, or a dw_builder")
        if (loss := _module_of(loss_fn)) is not None:
            self._roots["loss_fn"] = loss
            trained = {p for p in loss.parameters() if p.requires_grad}
            if trained.difference(*(parameters_of(stage.submod) for stage in stages)):
                advice = "make them part of the last stage"
                self._refuse("loss_fn", f"it has parameters of its own; {advice}")
        for root, module in self._roots.items():
            self._walk(root, module)
        self._add("float32_matmul_precision", None, torch.get_float32_matmul_precision())
        self._add("deterministic_algorithms", None, torch.are_deterministic_algorithms_enabled())

    def difference(self, now: State) -> str | None:
        """The first attribute in which a later state differs, with its stage; None if none does."""
        if self._found == now._found:
            return None
        differ = map(ne, self._found, now._found)
        return now._named(next((place for place, it_does in enumerate(differ) if it_does), -1))

    def _named(self, place: int) -> str:
        """An attribute, with its stage and the path of its module."""
        name = self._found[place][0]
        modules = (each for each in self._objects[place::-1] if isinstance(each, nn.Module))
        owner = next(modules, None)
        for root, top in self._roots.items():
            for path, module in top.named_modules():
                if module is owner:
                    return f"{root}: {(f'{path}.{name}' if path else name)!r}"
        return name

    def _refuse(self, root: str, reason: str) -> None:
        self.refusal = self.refusal or f"{root}: {reason}"

    def _walk(self, root: str, module: nn.Module) -> None:
        """Add a module and all inside of it."""
        waiting: list[nn.Module | None] = [module]
        seen: set[int] = set()
        while waiting:  # not by modules(), which takes several times as long
            inner = waiting.pop()
            if inner is None or id(inner) in seen:
                continue
            seen.add(id(inner))
            waiting += inner._modules.values()
            self._add("training", inner, inner.training)
            if _is_hooked(inner):
                kind = type(inner).__name__
                self._refuse(root, f"its module {kind} has hooks, which a replay would not call")
            own = {} if isinstance(inner, DistributedDataParallel) else vars(inner)
            for name, value in own.items():
                if name not in _OWN and not name.startswith(_OF_FSDP):
                    self._add_value(name, value)
            for name, tensor in chain(inner._parameters.items(), inner._buffers.items()):
                if tensor is None:
                    continue
                self._add_tensor(name, tensor)
                if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                    reason = f"its parameter {name!r} has hooks, which a replay would not call"
                    self._refuse(root, reason)

    def _add(self, name: str, by_identity: object, by_value: object) -> None:
        self._objects.append(by_identity)
        self._found.append((name, id(by_identity), by_value))

    def _add_value(self, name: str, value: Any, depth: int = 0) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._add(name, kind, value)
        elif isinstance(value, torch.Tensor):
            self._add_tensor(name, value)
        else:
            size = len(value) if isinstance(value, _CONTAINERS) else 0
            looked_into = not isinstance(value, _CLOSED) and id(value) not in self._seen
            if not self._deep:
                looked_into &= kind in (list, tuple, dict) and size <= _LONG and depth < _DEEP
            if not looked_into or depth >= _DEEPEST:
                self._add(name, value, size)
                return
            self._seen.add(id(value))
            self._add(name, kind if kind in (list, tuple, dict) else value, size)
            parts = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", {})
            for part in list(chain(*parts.items()) if isinstance(parts, dict) else parts):
                self._add_value(name, part, depth + 1)

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor: where it is; on another device its version, as a graph has its values."""
        outside, version = tensor.device.type != self._device, 0
        if (outside or self._deep) and not tensor.is_inference():
            version = tensor._version
        place: tuple[object, ...] = ()
        if tensor.layout == torch.strided:
            part = local(tensor.detach()) if is_sharded(tensor) else tensor
            place = (part.data_ptr(), part.shape, part.stride())
        self._add(name, tensor, (tensor.requires_grad, outside and version, place))
        self.versions.append(version)


def _module_of(loss_fn: Callable[..., Any] | None) -> nn.Module | None:
    """The module that a loss function is, or is a method or partial call of."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    owner = getattr(loss_fn, "__self__", loss_fn)
    return owner if isinstance(owner, nn.Module) else None


def _is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks of the user; our own do the same every time."""
    forward, before = module._forward_hooks, module._forward_pre_hooks
    backward, before_it = module._backward_hooks, module._backward_pre_hooks
    if not (forward or before or backward or before_it):
        return False  # most have none
    hooks = chain(forward.values(), before.values(), backward.values(), before_it.values())
    return not all(is_own_hook(hook) or _is_of_fsdp(hook) for hook in hooks)


def _is_of_fsdp(hook: object) -> bool:
    """Whether a hook is FSDP's, which only waits: a plan gathers and reduces."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
