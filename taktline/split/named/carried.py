"""What a forward carries from one call to the next one, such as a counter that it reads again.

A stage ends its forward where the next one begins. So it must not read, in its next call, what the
forward changes after that::

    forward of the model:   x * self.count   layer 0   layer 1   self.count += 1
    stage 0:                reads            real      ▶ leave   never comes to this
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from taktline.errors import PartitionError
from taktline.split.named.changes import Changes
from taktline.split.named.course import Cut
from taktline.split.named.mutable import look_at
from taktline.split.named.placeholder import Placeholder

__all__ = ["find_uncarried"]

Run = Callable[[Callable[[int], None]], None]
"""Goes through the forward, and calls a function with each stage that has ended."""

_SMALL = 1024


def find_uncarried(
    modules: Mapping[str, nn.Module], changed: Collection[str], cuts: Collection[Cut], run: Run
) -> dict[Cut, PartitionError]:
    """The cuts before which a stage reads what the forward changes after them, with an error.

    Args:
        modules: what every stage runs, by name.
        changed: the names of what the forward changes.
        cuts: where stages begin.
        run: goes through the forward.
    """
    state = Changes(modules, changed)
    state.keep()
    found: dict[Cut, PartitionError] = {}
    ends: list[Changes] = []
    looks: list[dict[str, Any]] = []
    read: dict[str, int] = {}

    def note_end(stage: int) -> None:
        ends.append(Changes(modules, changed))
        ends[-1].keep()
        looks.append(_looks(state))

    try:
        with _reading(modules, changed, lambda name: read.setdefault(name, len(ends))):
            run(note_end)
        after = _looks(state)
        whole: list[dict[str, Any]] = []
        run(lambda _: whole.append(_looks(state)))
        for stage, (end, start) in enumerate(zip(ends, cuts, strict=True)):
            late = {
                name
                for name in changed
                if looks[stage].get(name) != after.get(name) and read.get(name, len(ends)) <= stage
            }
            if not late:
                continue
            end.undo()
            own: list[dict[str, Any]] = []
            run(lambda _, own=own: own.append(_looks(state)))
            for name in sorted(late):
                if own[stage].get(name) != whole[stage].get(name):
                    found[start] = PartitionError(
                        f"stage {stage} reads {name!r}, which the forward changes after that stage "
                        f"has ended with the call of {start!r}, so it would not know of it; change "
                        f"{name!r} before that call, or cut the model elsewhere"
                    )
    finally:
        state.undo()
    return found


def _looks(state: Changes) -> dict[str, Any]:
    """What values are like, by their names; small tensors by what is in them."""
    return {name: look_at(value, _tensor_look) for name, value in state.values().items()}


def _tensor_look(tensor: torch.Tensor) -> Any:
    is_here = not isinstance(tensor, Placeholder) and not tensor.is_meta
    if is_here and tensor.numel() <= _SMALL:
        return str(tensor.tolist())
    return (is_here, tuple(tensor.shape), tensor.dtype, tensor._version if is_here else 0)


@contextmanager
def _reading(
    modules: Mapping[str, nn.Module], names: Collection[str], note: Callable[[str], object]
) -> Iterator[None]:
    """Note the names of attributes and buffers of modules that are read."""
    kinds = {path: type(module) for path, module in modules.items()}
    try:
        for path, module in modules.items():
            prefix = f"{path}." if path else ""
            own = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
            if own:
                module.__class__ = _watched(kinds[path], own, note)
        yield
    finally:
        for path, module in modules.items():
            module.__class__ = kinds[path]


def _watched(
    kind: type[nn.Module], names: Mapping[str, str], note: Callable[[str], object]
) -> type[nn.Module]:
    def getattribute(self: Any, name: str) -> Any:
        if name in names:
            note(names[name])
        return kind.__getattribute__(self, name)

    texts = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__getattribute__": getattribute, **texts})
