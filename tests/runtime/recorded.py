"""A graph without a GPU: the operations of a program, run again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from taktline import pytree


class _Recorder(TorchDispatchMode):
    """Records operations, and keeps the earlier values of all memory that they change."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._new: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a graph cannot wait for the device")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in pytree.tree_leaves(value):
                    self._keep(tensor)
        result = func(*args, **(kwargs or {}))
        # Not the tensors themselves: a gradient that someone holds is not written over.
        noted = pytree.tree_map_only(
            torch.Tensor, torch.Tensor.detach, (args, kwargs or {}, result)
        )
        self.operations.append((func, *noted))
        given = {_memory(leaf) for leaf in _tensors((args, kwargs))}
        self._new |= {_memory(leaf) for leaf in _tensors(result)} - given
        return result

    def _keep(self, tensor: torch.Tensor) -> None:
        memory = _memory(tensor)
        if memory not in self._new and memory not in self.before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self.before[memory] = whole, whole.clone()


class Recorded:
    """A graph whose replay runs the operations of the capture, and no Python.

    For programs that draw no random numbers, and whose operations declare what they change.
    """

    def __init__(self, graphs: Any) -> None:
        self._log: list[str] = graphs.log
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def capture(self, run: Callable[[], None]) -> None:
        self._log.append("capture")
        recorder = _Recorder()
        try:
            with recorder:
                run()
        finally:
            for memory, earlier in recorder.before.values():
                memory.copy_(earlier)
        self._operations = recorder.operations

    def replay(self) -> None:
        self._log.append("replay")
        with torch.no_grad():
            for func, args, kwargs, results in self._operations:
                again = func(*args, **kwargs)
                for result, new in zip(_tensors(results), _tensors(again), strict=True):
                    if _memory(result) != _memory(new):
                        result.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
