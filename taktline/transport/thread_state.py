"""The state that torch keeps for each thread, for ranks that run in threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import overrides
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils import _python_dispatch

__all__ = ["Random", "ThreadState"]

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
        self._hooks = _Hooks()
        self._modes = _Modes()

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
            stack.enter_context(self._hooks.entered())
            stack.enter_context(self._modes.entered())
            return fn(*args)


# The rest uses private names of torch: there are no public ones to read the state of a thread.


class _Hooks:
    """Hooks on the tensors that autograd saves; of several, the innermost are the ones called."""

    def __init__(self) -> None:
        private: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
        self._pair = private._top_saved_tensors_default_hooks(False)
        self._refusal = private._saved_tensors_hooks_get_disabled_error_message()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set the same in this thread."""
        with ExitStack() as stack:
            if self._pair is not None:
                stack.enter_context(saved_tensors_hooks(*self._pair))
            if self._refusal is not None:
                stack.enter_context(disable_saved_tensors_hooks(self._refusal))
            yield


class _Modes:
    """Modes that see functions (``torch.device`` blocks) or operations (``FlopCounterMode``)."""

    def __init__(self) -> None:
        self._functions = overrides._get_current_function_mode_stack()
        self._operations = _python_dispatch._get_current_dispatch_mode_stack()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set the same in this thread."""
        # Pushed, not entered: a mode has state, which entering may begin anew.
        for mode in self._operations:
            _python_dispatch._push_mode(mode)
        for mode in self._functions:
            overrides._push_mode(mode)
        try:
            yield
        finally:
            # All modes: one that was entered inside and not left must not stay for the next run.
            for _ in overrides._get_current_function_mode_stack():
                overrides._pop_mode()
            for mode in reversed(_python_dispatch._get_current_dispatch_mode_stack()):
                _python_dispatch._pop_mode(getattr(mode, "_mode_key", None))
