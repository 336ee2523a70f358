"""What a forward calls past ``__torch_function__``: checkpoints, and functions of autograd.

A function of autograd must get the values of placeholders, or it would have no gradient for them.

``checkpoint(block, x)`` is a function to autograd if it is re-entrant: its output has a gradient if
``x`` has one. A placeholder has none, and gets its data inside of the block, too late; so a block
that is given placeholders runs as it is. So does one that a stage begins or ends in: it could not
run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from types import MethodType
from typing import Any, Self

import torch
from torch.utils import checkpoint as torch_checkpoint

from taktline.split.named.placeholder import Placeholder, PlaceholderContext, here, resolved

__all__ = ["Checkpoints"]

_Function = torch.autograd.Function
_apply: Callable[..., Any] = _Function.__dict__["apply"].__func__

_GENERATOR = "_checkpoint_without_reentrant_generator"
_names: dict[str, Any] = torch_checkpoint.__dict__
_kept: Callable[..., Any] = torch_checkpoint.CheckpointFunction.apply
_kept_anew: Callable[..., Any] = _names[_GENERATOR]


class Checkpoints(PlaceholderContext):
    """A forward that may have checkpoints, which are numbered in the order of their calls."""

    opened: frozenset[int] = frozenset()
    """Those that a cut goes through."""
    is_kept = False
    """Whether one runs, so that what is computed has no gradient yet."""

    def __enter__(self) -> Self:
        self._checkpoints = -1
        self.open_checkpoints: list[int] = []
        _replace(1)
        return super().__enter__()

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        _replace(-1)

    def is_open(self, checkpoint: int) -> bool:
        """Whether what is to be checkpointed runs as it is."""
        return checkpoint in self.opened

    def next_checkpoint(self) -> int:
        """The number of one that begins."""
        self._checkpoints += 1
        return self._checkpoints

    @contextmanager
    def open_checkpoint(self, checkpoint: int) -> Iterator[None]:
        """Note that one runs as it is."""
        self.open_checkpoints.append(checkpoint)
        try:
            yield
        finally:
            self.open_checkpoints.pop()

    def checkpoint(self, function: Callable[..., Any], preserve: bool, args: Any) -> Any:
        """Run what is to be checkpointed, re-entrantly."""
        number, args = self.next_checkpoint(), resolved(args)
        if self.is_open(number) or any(isinstance(arg, Placeholder) for arg in args):
            with self.open_checkpoint(number):
                return function(*args)
        self.is_kept = True
        try:
            return _kept(function, preserve, *args)
        finally:
            self.is_kept = False


_lock = Lock()
_running = 0
"""How many forwards run just now, in all threads."""


def _replace(change: int) -> None:
    """Have functions of torch replaced while any forward runs."""
    global _running
    with _lock:
        _running += change
        is_on = _running > 0
        function: Any = torch_checkpoint.CheckpointFunction
        function.apply = staticmethod(_checkpoint) if is_on else _kept
        _names[_GENERATOR] = _checkpoint_anew if is_on else _kept_anew
        any_function: Any = _Function
        any_function.apply = classmethod(_apply_resolved if is_on else _apply)


def _apply_resolved(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """What any function of autograd does, in any thread."""
    context = here.context
    if context is None:
        return _apply(kind, *args, **kwargs)
    args, kwargs = resolved((args, kwargs))
    # As a whole: what it returns may be known, but what is done in it has no gradient.
    is_known = not any(isinstance(arg, Placeholder) for arg in args)
    apply = MethodType(_apply, kind)
    return apply(*args, **kwargs) if is_known else context.call(apply, args, kwargs)


def _checkpoint(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """What torch asks autograd for, in any thread."""
    context = here.context
    if isinstance(context, Checkpoints):
        return context.checkpoint(function, preserve, args)
    return _kept(function, preserve, *args)


def _checkpoint_anew(*args: Any, **kwargs: Any) -> Iterator[None]:
    """What torch has around a checkpoint that is not re-entrant, in any thread."""
    context = here.context
    if isinstance(context, Checkpoints) and context.is_open(number := context.next_checkpoint()):
        return _as_it_is(context, number)
    return _kept_anew(*args, **kwargs)


def _as_it_is(context: Checkpoints, number: int) -> Iterator[None]:
    with context.open_checkpoint(number):
        yield
