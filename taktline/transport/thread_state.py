"""The state that torch keeps for each thread, for ranks that run in threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils import _python_dispatch

T = TypeVar("T")

_CASTS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Random:
    """The state of the generators of random numbers."""

    on_cpu: torch.Tensor
    on_cuda: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> Random:
        """The current state; that of CUDA only if CUDA is initialised."""
        on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
        return cls(torch.get_rng_state(), tuple(on_cuda))

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.on_cpu)
        torch.cuda.set_rng_state_all(self.on_cuda)


class ThreadState:
    """The state of the caller's thread, to be set in another one.

    Modes of gradients, inference and autocast, the stream, hooks on saved tensors, modes that see
    functions and operations (``torch.device`` blocks, ``FlopCounterMode``), context variables, the
    number of threads to compute with, and where random numbers begin.

    >>> with torch.no_grad():
    ...     state = ThreadState()
    >>> state.run(torch.is_grad_enabled)
    False
    """

    def __init__(self) -> None:
        self.random = Random.now()
        self._context = copy_context()
        self._threads = torch.get_num_threads()
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._casts = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in _CASTS
            if torch.is_autocast_enabled(kind)
        ]
        self._cached = torch.is_autocast_cache_enabled()
        # A stream brings its device along.
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        # Private names of torch: there are no public ones to read the state of a thread.
        private: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
        # Of several pairs of hooks, the innermost are the ones called.
        self._hooks = private._top_saved_tensors_default_hooks(False)
        self._no_hooks = private._saved_tensors_hooks_get_disabled_error_message()
        self._function_modes = overrides._get_current_function_mode_stack()
        self._dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Call a function with this state, and with a copy of the context variables."""
        return self._context.copy().run(self._run, fn, *args)

    def _run(self, fn: Callable[..., T], *args: Any) -> T:
        # Read before anything runs: in a new thread, some kernels take all cores otherwise.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cached))
            if self._hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self._hooks))
            if self._no_hooks is not None:
                stack.enter_context(disable_saved_tensors_hooks(self._no_hooks))
            stack.callback(_leave_modes)
            # Pushed, not entered: a mode has state, which entering may begin anew.
            for mode in self._dispatch_modes:
                _python_dispatch._push_mode(mode)
            for mode in self._function_modes:
                overrides._push_mode(mode)
            return fn(*args)


def _leave_modes() -> None:
    """Leave all modes: one that was entered inside and not left must not stay for the next run."""
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in reversed(_python_dispatch._get_current_dispatch_mode_stack()):
        _python_dispatch._pop_mode(getattr(mode, "_mode_key", None))
