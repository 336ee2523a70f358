"""The state that torch keeps for each thread, for ranks that run in threads of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from taktline.private import missing, private

_log = logging.getLogger("taktline")

T = TypeVar("T")

_CASTS = ("cpu", "cuda")

_MODES, _HOOKS = "a mode of torch on local ranks", "a hook on saved tensors of local ranks"
_function_modes = private("torch.overrides._get_current_function_mode_stack", _MODES)
_push_function_mode = private("torch.overrides._push_mode", _MODES)
_pop_function_mode = private("torch.overrides._pop_mode", _MODES)
_dispatch_modes = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack", _MODES)
_push_dispatch_mode = private("torch.utils._python_dispatch._push_mode", _MODES)
_pop_dispatch_mode = private("torch.utils._python_dispatch._pop_mode", _MODES)
_top_hooks = private("torch._C._autograd._top_saved_tensors_default_hooks", _HOOKS)
_hooks_error = private("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", _HOOKS)
_no_modes = missing(
    _function_modes,
    _push_function_mode,
    _pop_function_mode,
    _dispatch_modes,
    _push_dispatch_mode,
    _pop_dispatch_mode,
)
_no_hooks = missing(_top_hooks, _hooks_error)


@cache
def _say_what_is_missing() -> None:
    """Log, once, what local ranks do not get from the caller's thread."""
    for reason in (_no_modes, _no_hooks):
        if reason is not None:
            _log.warning("%s; it does not reach them", reason)


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
        _say_what_is_missing()
        # Of several pairs of hooks, the innermost are the ones called.
        self._hooks = None if _no_hooks else _top_hooks(False)
        self._no_hooks = None if _no_hooks else _hooks_error()
        self._function_modes = () if _no_modes else _function_modes()
        self._dispatch_modes = () if _no_modes else _dispatch_modes()

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
            if not _no_modes:
                stack.callback(_leave_modes)
            # Pushed, not entered: a mode has state, which entering may begin anew.
            for mode in self._dispatch_modes:
                _push_dispatch_mode(mode)
            for mode in self._function_modes:
                _push_function_mode(mode)
            return fn(*args)


def _leave_modes() -> None:
    """Leave all modes: one that was entered inside and not left must not stay for the next run."""
    for _ in _function_modes():
        _pop_function_mode()
    for mode in reversed(_dispatch_modes()):
        _pop_dispatch_mode(getattr(mode, "_mode_key", None))
