"""What must be replaced while a forward is recorded, since it runs no function that torch shows.

In other threads all is as before, and so it is everywhere once the recording has ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from taktline.errors import TorchVersionError
from taktline.private import missing, private

_GENERATOR = "_checkpoint_without_reentrant_generator"
_generator = private(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator", "a recorded forward"
)


@contextmanager
def patched(recorder: Any, empty: Any) -> Iterator[None]:
    """Let calls of modules, functions of autograd and checkpoints come to a recorder."""
    if reason := missing(_generator):
        raise TorchVersionError(reason)
    kinds = {kind for module in empty.model.modules() for kind in type(module).__mro__}
    with ExitStack() as stack:
        for kind in kinds:
            if "__call__" in vars(kind):
                stack.enter_context(_replaced(kind, "__call__", partial(_call, recorder)))
        function = torch.autograd.Function
        stack.enter_context(_replaced(function, "apply", partial(_apply, recorder)))
        stack.enter_context(_replaced(torch_checkpoint, _GENERATOR, partial(_region, recorder)))
        yield


@contextmanager
def _replaced(holder: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Let an attribute be what a function makes of it, for a while."""
    is_own, before = name in vars(holder), inspect.getattr_static(holder, name)
    setattr(holder, name, make(before))
    try:
        yield
    finally:
        if is_own:
            setattr(holder, name, before)
        else:
            delattr(holder, name)


def _call(recorder: Any, before: Any) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.module(self, partial(before, self), args, kwargs)

    return call


def _apply(recorder: Any, before: Any) -> Any:
    """For functions of autograd, and re-entrant checkpoints among them."""

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        original = before.__get__(None, kind)
        if recorder.is_recording and kind is torch_checkpoint.CheckpointFunction:
            run, preserves, *rest = args
            with recorder.region(bool(preserves)):
                return run(*rest)
        return recorder.function(original, args, kwargs)

    return classmethod(apply)


def _region(recorder: Any, before: Any) -> Any:
    """For checkpoints that are not re-entrant."""

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not recorder.is_recording:
            yield from before(*args, **kwargs)
            return
        given = inspect.signature(before).bind(*args, **kwargs).arguments
        with recorder.region(bool(given.get("preserve_rng_state", True))):
            yield

    return generator
