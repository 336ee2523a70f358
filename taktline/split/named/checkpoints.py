"""Checkpoints and functions of autograd in a forward, which ``__torch_function__`` does not see.

A function of autograd must get the values of placeholders, or it would have no gradient for them.

A re-entrant ``checkpoint(block, x)`` is a function of autograd: its output has a gradient if ``x``
has one. A placeholder has none, and gets its data inside of the block, too late. So a block that
gets placeholders runs without its checkpoint. So does a block in which a stage begins or ends: it
could not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from threading import Lock
from typing import Any, Self

import torch
from torch.utils import checkpoint as torch_checkpoint

from taktline.split.named.placeholder import Placeholder, PlaceholderContext, here, resolved

_Function = torch.autograd.Function
_apply: Any = getattr_static(_Function, "apply")
"""A class method: of Python or of C, by the version of torch."""

_GENERATOR = "_checkpoint_without_reentrant_generator"
_names: dict[str, Any] = torch_checkpoint.__dict__
_torch_reentrant: Callable[..., Any] = torch_checkpoint.CheckpointFunction.apply
_torch_generator: Callable[..., Any] | None = _names.get(_GENERATOR)


class Checkpoints(PlaceholderContext):
    """A forward of a model; its checkpoints are numbered in the order of their calls."""

    runs_model = True
    is_inside = False
    """Whether an own unit runs."""
    opened: Collection[int] = ()
    """The checkpoints that a cut goes through."""
    in_reentrant = False
    """Whether a re-entrant checkpoint runs, so that its tensors have no gradient yet."""

    def __enter__(self) -> Self:
        self._checkpoints = -1
        self.open_checkpoints: list[int] = []
        _replace(1)
        return super().__enter__()

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        _replace(-1)

    def is_open(self, checkpoint: int) -> bool:
        """Whether a block runs without its checkpoint."""
        return checkpoint in self.opened

    def next_checkpoint(self) -> int:
        """The number of a checkpoint that begins."""
        self._checkpoints += 1
        return self._checkpoints

    @contextmanager
    def open_checkpoint(self, checkpoint: int) -> Iterator[None]:
        """Note that a block runs without its checkpoint."""
        self.open_checkpoints.append(checkpoint)
        try:
            yield
        finally:
            self.open_checkpoints.pop()

    def checkpoint(self, function: Callable[..., Any], preserve: bool, args: Any) -> Any:
        """Run a block with a re-entrant checkpoint, if possible."""
        number, args = self.next_checkpoint(), resolved(args)
        if self.is_open(number) or any(isinstance(arg, Placeholder) for arg in args):
            with self.open_checkpoint(number):
                return function(*args)
        self.in_reentrant = True
        try:
            return _torch_reentrant(function, preserve, *args)
        finally:
            self.in_reentrant = False


_lock = Lock()
_running = 0
"""How many forwards run now, in all threads."""


def _replace(change: int) -> None:
    """Replace functions of torch while any forward runs."""
    global _running
    with _lock:
        _running += change
        is_on = _running > 0
        function: Any = torch_checkpoint.CheckpointFunction
        function.apply = staticmethod(_checkpoint_reentrant) if is_on else _torch_reentrant
        if _torch_generator is not None:
            _names[_GENERATOR] = _checkpoint_generator if is_on else _torch_generator
        any_function: Any = _Function
        any_function.apply = classmethod(_apply_resolved) if is_on else _apply


def _apply_resolved(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``torch.autograd.Function.apply``, in all threads."""
    context, apply = here.context, _apply.__get__(None, kind)
    if context is None:
        return apply(*args, **kwargs)
    args, kwargs = resolved((args, kwargs))
    # Called as a whole: operations inside of it have no gradient.
    is_known = not any(isinstance(arg, Placeholder) for arg in args)
    return apply(*args, **kwargs) if is_known else context.call(apply, args, kwargs)


def _checkpoint_reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Replaces the function of re-entrant checkpoints, in all threads."""
    context = here.context
    if isinstance(context, Checkpoints):
        return context.checkpoint(function, preserve, args)
    return _torch_reentrant(function, preserve, *args)


def _checkpoint_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replaces the generator of other checkpoints, in all threads."""
    context = here.context
    if isinstance(context, Checkpoints) and context.is_open(number := context.next_checkpoint()):
        with context.open_checkpoint(number):
            yield
    elif _torch_generator is not None:
        yield from _torch_generator(*args, **kwargs)
