"""What must be replaced while a forward is recorded, since it runs no function that torch shows.

In other threads all is as before, and so it is everywhere once the recording has ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
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
    """Let calls of units, functions of autograd and checkpoints come to a recorder."""
    with ExitStack() as stack:
        for module in empty.modules.values():
            stack.enter_context(_calling(module, recorder))
        for module in empty.model.modules():
            hook = module.register_forward_hook(partial(_note, recorder))
            stack.callback(hook.remove)
        stack.enter_context(_functions(recorder))
        stack.enter_context(_checkpoints(recorder))
        yield


def _note(recorder: Any, module: nn.Module, _: Any, output: Any) -> None:
    recorder.note_inner(module, output)


@contextmanager
def _calling(module: nn.Module, recorder: Any) -> Iterator[None]:
    """Let a unit without data be recorded when it is called."""
    kind = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.unit(self, partial(kind.__call__, self), args, kwargs)

    texts = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, **texts})
    try:
        yield
    finally:
        module.__class__ = kind


@contextmanager
def _functions(recorder: Any) -> Iterator[None]:
    """Let functions of autograd, and re-entrant checkpoints among them, be recorded."""
    function: Any = torch.autograd.Function
    own = vars(function).get("apply")
    before: Any = inspect.getattr_static(function, "apply")

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        original = before.__get__(None, kind)
        if recorder.is_inside or not recorder.is_here():
            return original(*args, **kwargs)
        if kind is torch_checkpoint.CheckpointFunction:
            run, preserves, *rest = args
            with recorder.region(bool(preserves)):
                return run(*rest)
        recorder.require_no_modules((args, kwargs))
        return recorder.function(original, args, kwargs)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        if own is None:
            del function.apply
        else:
            function.apply = own


@contextmanager
def _checkpoints(recorder: Any) -> Iterator[None]:
    """Let what runs in checkpoints that are not re-entrant be recorded as a region."""
    if reason := missing(_generator):
        raise TorchVersionError(reason)
    names: Any = torch_checkpoint.__dict__
    before = names[_GENERATOR]

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if recorder.is_inside or not recorder.is_here():
            yield from before(*args, **kwargs)
            return
        given = inspect.signature(before).bind(*args, **kwargs).arguments
        with recorder.region(bool(given.get("preserve_rng_state", True))):
            yield

    names[_GENERATOR] = generator
    try:
        yield
    finally:
        names[_GENERATOR] = before
