"""Compiled stages whose backward is split: gradients of inputs in I, and of weights in W.

::

    whole      saved, dY ──▶ ┌────────────────┐ ──▶ dX, db, dW
                             └────────────────┘
    in I       saved, dY ──▶ ┌──────────┐ ──▶ dX, db
                             └────┬─────┘
    in W       saved ───────▶ ┌───▼──────┐ ──▶ dW
                              └──────────┘

W computes the last products on the way to gradients of weights, and all that follows from them. I
computes the rest, fused with its inputs: sums for biases and norms cost next to nothing there, and
in W would need activations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from taktline.errors import text_of
from taktline.private import missing, private
from taktline.stage.kinds import CompiledCall, note_part, running
from taktline.stage.split_backward import CompiledNode, Pending, add_to_grads

_log = logging.getLogger("taktline")

Call: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes a list of arguments and empties it, so that each can be freed after its use."""

Compile: TypeAlias = Callable[[fx.GraphModule, Sequence[Any], Sequence[int]], Call]
"""Compiles a graph for example arguments, whose numbers in the whole backward are given."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution_backward", "embedding_dense_backward")
_VIEWS = ("alias", "expand", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view")
_FEATURE = "a compiled backward in halves"
_current_node = private("torch._C._current_autograd_node", _FEATURE)


def compile_stages(module: nn.Module, stage: int = 0, *, dynamic: bool | None = None) -> nn.Module:
    """Compile a stage by ``torch.compile``, so that its backward splits into I and W.

    Of a stage that was cut from a model, each submodule by itself; equal ones are compiled once.
    For ``prepare=`` of a :class:`Pipeline`. Under plain ``torch.compile`` I computes all gradients,
    and W is empty. If a backward cannot be divided, I computes all of it, and the log
    ("taktline") has a warning with the reason.

    Args:
        module: the stage.
        stage: its number, for warnings.
        dynamic: as in ``torch.compile``: whether sizes may change without recompiling.

    >>> compiled = compile_stages(nn.Linear(2, 2))
    """
    # One backend for all: torch does not share what another one has compiled.
    options: dict[str, Any] = {"backend": _compiled, "dynamic": dynamic}
    if type(module).compile is not nn.Module.compile:  # the module chooses what to compile
        module.compile(**options)
        return module
    compiled = torch.compile(module, **options)
    assert isinstance(compiled, nn.Module)
    vars(compiled)["forward"] = CompiledCall(module, f"stage {stage}", **options)
    return compiled


@cache
def _compiler() -> SimpleNamespace:
    """What torch's compiler is made of; looked up late, because this loads the compiler."""
    return SimpleNamespace(
        compile=private("torch._inductor.compile_fx.compile_fx", _FEATURE),
        compile_inner=private("torch._inductor.compile_fx.compile_fx_inner", _FEATURE),
        autograd_config=private("torch._functorch.config", _FEATURE),
        inductor_config=private("torch._inductor.config", _FEATURE),
        virtualized=private("torch._inductor.virtualized.V", _FEATURE),
        tracing=private("torch._guards.tracing", _FEATURE),
        tracing_context=private("torch._guards.TracingContext", _FEATURE),
        compiling=private("torch._guards.compile_context", _FEATURE),
        compile_context=private("torch._guards.CompileContext", _FEATURE),
    )


def _compiled(graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph that was traced from a forward: by Inductor, but for the backward."""
    names, where = _compiler(), running.name
    if (reason := missing(*vars(names).values(), _current_node)) is not None:
        _log.warning("%s: its compiled backward stays whole, so W is empty: %s", where, reason)
        return names.compile(graph, example)
    tensors: list[bool] = []

    def inner(graph: fx.GraphModule, example: Sequence[Any], **options: Any) -> Any:
        """Compile the forward, and then the backward; ``options`` are Inductor's."""
        if not options.get("is_backward"):
            tensors[:] = [isinstance(value, torch.Tensor) for value in example]
            with _unchecked():
                return names.compile_inner(graph, example, **options)
        return Backward(graph, example, _later(options), where=where, tensors=tensors)

    # I must not overwrite values for W, and cached backwards are whole.
    with names.autograd_config.patch(donated_buffer=False, enable_autograd_cache=False):
        return names.compile(graph, example, inner_compile=inner)


def _unchecked() -> AbstractContextManager[None]:
    """What is compiled inside does not check its arguments: torch's guards have.

    To check the strides of one takes as long as launching a small kernel. Those of a backward come
    from the compiled forward, and from the first half.
    """
    return _compiler().inductor_config.patch(size_asserts=False)


def _later(options: Mapping[str, Any]) -> Compile:
    """Compiles parts of a backward when they are first needed, in the context of now."""
    names = _compiler()
    tracing, compiling = names.tracing_context.try_get(), names.compile_context.try_get()
    fake, static = names.virtualized.fake_mode, set(options.get("static_input_idxs") or ())

    def compile(graph: fx.GraphModule, example: Sequence[Any], takes: Sequence[int]) -> Call:
        places = [place for place, i in enumerate(takes) if i in static]
        with (
            names.tracing(tracing),
            names.compiling(compiling),
            names.virtualized.set_fake_mode(fake),
            _unchecked(),
        ):
            return names.compile_inner(graph, example, **{**options, "static_input_idxs": places})

    return compile


class Backward:
    """Called by autograd with saved values and the gradients of outputs.

    If the running node has an attribute ``put_off``, its :class:`Pending` takes over the gradients
    of the weights that may wait.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        example: Sequence[Any],
        compiles: Compile,
        *,
        where: str,
        tensors: Sequence[bool],
    ) -> None:
        """``tensors`` is whether each argument of the forward is a tensor."""
        self._boxed_call = True
        """Tells torch that it takes a list; torch looks for it in the instance."""
        self._graph = graph
        self._example = example
        self._compiles = compiles
        self._where = where
        self._edges = [i for i, is_tensor in enumerate(tensors) if is_tensor]
        """For each edge of the node, the argument of the forward that it leads to."""
        self._whole: Call | None = None
        # By the results that may come later; None where none can.
        self._halves: dict[tuple[int, ...], tuple[Halves, Call, Call] | None] = {}

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """The gradients of the forward's arguments, None where they are put off."""
        put_off: tuple[Pending, CompiledNode] | None = getattr(_current_node(), "put_off", None)
        if put_off is not None and put_off[1].edges == len(self._edges):
            pending, node = put_off
            weights = {self._edges[edge]: leaf for edge, leaf in node.leaves.items()}
            later = tuple(weights)
            if later not in self._halves:
                self._halves[later] = self._divided(later)
            if (found := self._halves[later]) is not None:
                return _run_first(*found, arguments, weights, pending)
        if self._whole is None:
            # A compiler changes its graph.
            copied = fx.GraphModule(self._graph, deepcopy(self._graph.graph))
            note_part()
            self._whole = self._compiles(copied, self._example, range(len(self._example)))
        return self._whole(arguments)

    def _divided(self, later: Collection[int]) -> tuple[Halves, Call, Call] | None:
        """The two halves, and each of them compiled; None, and a warning, if that fails."""
        try:
            if (halves := divide(self._graph, later)) is None:
                return None
            first = [self._example[i] for i in halves.takes_first]
            second = [self._example[i] for i in halves.takes_second]
            second += [node.meta["val"] for node in halves.crossing]
            note_part()
            return (
                halves,
                self._compiles(halves.first, first, halves.takes_first),
                self._compiles(halves.second, second, halves.takes_second),
            )
        except Exception as error:
            reason = text_of(error)
            if not isinstance(error, Undivided):
                reason = f"its halves do not compile: {type(error).__name__}: {reason}"
            text = "%s: its compiled backward stays whole, so W is empty there: %s"
            _log.warning(text, self._where, reason)
            return None


class Undivided(Exception):
    """A backward cannot be divided; the text says why."""


def _run_first(
    halves: Halves,
    first: Call,
    second: Call,
    arguments: list[Any],
    weights: Mapping[int, torch.Tensor],
    pending: Pending,
) -> Sequence[Any]:
    """The gradients of I; ``pending`` takes over those of other ``weights``, by argument."""
    held = [arguments[i] for i in halves.takes_second]
    taken = [arguments[i] for i in halves.takes_first]
    arguments.clear()
    results = list(first(taken))
    count = len(results) - len(halves.crossing)
    late = [weights[place] for place in halves.later]
    pending.take_over([*held, *results[count:]], partial(_run_second, second, late))
    return results[:count]


def _run_second(second: Call, weights: Sequence[torch.Tensor], held: list[Any]) -> None:
    # The graph has its casts.
    with torch.no_grad(), torch.autocast(weights[0].device.type, enabled=False):
        add_to_grads(weights, second(held))


@dataclass(frozen=True, slots=True)
class Halves:
    """The two halves of a graph, and the arguments of each."""

    first: fx.GraphModule
    """Returns all results, None for those of the second, and then inputs of the second."""
    second: fx.GraphModule
    """Takes arguments of the whole, and results of the first."""
    takes_first: tuple[int, ...]
    takes_second: tuple[int, ...]
    crossing: tuple[fx.Node, ...]
    """The nodes that the first computes for the second."""
    later: tuple[int, ...]
    """The numbers of the results that the second returns."""


def divide(whole: fx.GraphModule, later: Collection[int]) -> Halves | None:
    """The halves of a graph whose results ``later`` may come later; None if none of them can."""
    nodes = list(whole.graph.nodes)
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise Undivided(f"its backward changes a tensor in place ({node.target})")
    results: Sequence[Any] = nodes[-1].args[0]
    late = _late(nodes, results, later)
    ours = tuple(i for i in later if isinstance(results[i], fx.Node) and results[i] in late)
    if not ours:
        return None
    given = [node for node in nodes if node.op == "placeholder"]
    needed = (need for node in nodes if node in late for need in node.all_input_nodes)
    crossing = [
        node
        for node in dict.fromkeys(needed)
        if node not in late and node.op not in ("placeholder", "get_attr")
    ]
    if not all(isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt)) for node in crossing):
        raise Undivided("W needs a non-tensor value")
    early = [None if i in ours else result for i, result in enumerate(results)]
    first, takes_first = _part(whole, given, [*early, *crossing], ())
    second, takes_second = _part(whole, given, [results[i] for i in ours], crossing)
    return Halves(first, second, takes_first, takes_second, tuple(crossing), ours)


def _late(nodes: Sequence[fx.Node], results: Sequence[Any], later: Collection[int]) -> set[fx.Node]:
    """The nodes of W."""
    now = _needed(result for i, result in enumerate(results) if i not in later)
    # Products with weights lead to gradients of weights, too, if those of inputs are not needed.
    now |= _needed(need for node in nodes if _is(node, _PRODUCTS) for need in node.all_input_nodes)
    then = _needed(results[i] for i in later) - now
    late: set[fx.Node] = set()
    for node in nodes:
        if node in then and (_is(node, _PRODUCTS) or any(x in late for x in node.all_input_nodes)):
            late.add(node)
    for node in reversed(nodes):  # a view is free in W; in I, its base would be kept besides
        if _is(node, _VIEWS) and all(user in late for user in node.users):
            late.add(node)
    return late


def _is(node: fx.Node, names: Sequence[str]) -> bool:
    """Whether a node calls one of these operations of ATen."""
    library, _, name = str(getattr(node.target, "overloadpacket", "")).partition(".")
    return library == "aten" and name in names


def _needed(results: Iterable[Any], known: Collection[fx.Node] = ()) -> set[fx.Node]:
    """All nodes that results are computed from; ``known`` are computed already."""
    found: set[fx.Node] = set()
    waiting = [node for node in results if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node in known else node.all_input_nodes
    return found


def _part(
    whole: fx.GraphModule,
    given: Sequence[fx.Node],
    results: Sequence[Any],
    known: Sequence[fx.Node],
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A graph that computes results from arguments of the whole and nodes of the first half."""
    needed = _needed(results, known)
    # Dynamic sizes are arguments of their own.
    takes = [
        i for i, x in enumerate(given) if x in needed or isinstance(x.meta.get("val"), torch.SymInt)
    ]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*(given[i] for i in takes), *known]:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in whole.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output([copies[x] if isinstance(x, fx.Node) else x for x in results])
    # Visible outputs keep the strides of the trace.
    visible = [i for i, x in enumerate(results) if isinstance(x, fx.Node)]
    output.meta["user_visible_output_idxs"] = visible
    return fx.GraphModule(whole, graph), tuple(takes)
