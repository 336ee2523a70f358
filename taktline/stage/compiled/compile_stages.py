"""``compile_stages``: ``torch.compile`` with a backward that can be split."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.autograd import profiler

from taktline.checks import known_keywords
from taktline.private import missing, private
from taktline.stage.compiled.backward import Backward, Call, current_node

_log = logging.getLogger("taktline")


@known_keywords
def compile_stages(module: nn.Module, stage: int = 0, *, dynamic: bool | None = None) -> nn.Module:
    """Compile a stage by ``torch.compile``, so that its backward splits into I and W.

    For ``prepare=`` of a :class:`Pipeline`. Under plain ``torch.compile`` I computes all gradients,
    and W is empty. If a backward cannot be divided, I computes all of it, and the log
    ("taktline") has a warning with the reason.

    Args:
        module: the stage.
        stage: its number, for warnings.
        dynamic: as in ``torch.compile``: whether sizes may change without recompiling.

    >>> compile_stages(nn.Linear(2, 2))
    OptimizedModule(
      (_orig_mod): Linear(in_features=2, out_features=2, bias=True)
    )
    """
    backend = partial(_compiled, f"stage {stage}")
    if type(module).compile is not nn.Module.compile:  # the module chooses what to compile
        module.compile(backend=backend, dynamic=dynamic)
        return module
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    assert isinstance(compiled, nn.Module)
    return compiled


def _compiled(where: str, graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph that was traced from a forward: by Inductor, but for the backward."""
    names = _compiler()
    if (reason := missing(*names, current_node)) is not None:
        _log.warning("%s: its compiled backward stays whole, so W is empty: %s", where, reason)
        by_torch = private("torch._dynamo.lookup_backend", "a compiled stage")("inductor")
        return by_torch(graph, example)
    tensors: list[bool] = []

    def inner(graph: fx.GraphModule, example: Sequence[Any], **options: Any) -> Any:
        """Compile the forward, and then the backward; ``options`` are Inductor's."""
        if not options.get("is_backward"):
            tensors[:] = [isinstance(value, torch.Tensor) for value in example]
            return names.compile_inner(graph, example, **options)
        return Backward(graph, example, _Later(options), where=where, tensors=tensors)

    # I must not overwrite values for W, and cached backwards are whole.
    with names.autograd.patch(donated_buffer=False, enable_autograd_cache=False):
        made: Any = names.compile(graph, example, inner_compile=inner)
    return made


class _Compiler(NamedTuple):
    """What torch's compiler is made of."""

    compile: Any
    compile_inner: Any
    autograd: Any
    """The settings of the part that makes a forward and a backward from a graph."""
    inductor: Any
    """The settings of the part that compiles each of them."""
    virtualized: Any
    tracing: Any
    tracing_context: Any
    compiling: Any
    compile_context: Any


@cache
def _compiler() -> _Compiler:
    """Looked up for the first stage that is compiled, because this loads the compiler."""
    what = "a compiled backward in halves"
    return _Compiler(
        compile=private("torch._inductor.compile_fx.compile_fx", what),
        compile_inner=private("torch._inductor.compile_fx.compile_fx_inner", what),
        autograd=private("torch._functorch.config", what),
        inductor=private("torch._inductor.config", what),
        virtualized=private("torch._inductor.virtualized.V", what),
        tracing=private("torch._guards.tracing", what),
        tracing_context=private("torch._guards.TracingContext", what),
        compiling=private("torch._guards.compile_context", what),
        compile_context=private("torch._guards.CompileContext", what),
    )


class _Later:
    """Compiles parts of a backward when they are first needed, in the context of its creation."""

    def __init__(self, options: dict[str, Any]) -> None:
        names = _compiler()
        self._options = options
        self._tracing = names.tracing_context.try_get()
        self._compiling = names.compile_context.try_get()
        self._fake = names.virtualized.fake_mode

    def __call__(self, graph: fx.GraphModule, example: Sequence[Any], takes: Sequence[int]) -> Call:
        """Compile a graph; ``takes`` are its arguments among those of the whole backward."""
        names = _compiler()
        static = set(self._options.get("static_input_idxs") or ())
        places = [place for place, i in enumerate(takes) if i in static]
        options: dict[str, Any] = {**self._options, "static_input_idxs": places}
        with ExitStack() as stack:
            stack.enter_context(names.tracing(self._tracing))
            stack.enter_context(names.compiling(self._compiling))
            stack.enter_context(names.virtualized.set_fake_mode(self._fake))
            # Checking the strides of an argument takes as long as launching a small kernel. These
            # come from the compiled forward, and from the first half.
            stack.enter_context(names.inductor.patch(size_asserts=False))
            made: Any = names.compile_inner(graph, example, **options)
            # It returns a plain function for a graph that computes nothing.
            return _Direct(made) if hasattr(made, "current_callable") else made


class _Direct:
    """A compiled graph; its first call goes through torch, which measures and caches."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._has_run = False

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        if self._has_run and not getattr(profiler, "_is_profiler_enabled", True):
            return self._graph.current_callable(arguments)
        self._has_run = True
        return self._graph(arguments)
