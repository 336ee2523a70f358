"""The backward of a compiled graph: whole, or with the gradients of weights put off to W."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any, TypeAlias

import torch
from torch import fx

from taktline.errors import text_of
from taktline.private import private
from taktline.stage.autograd_engine import Sums, add_to_grad
from taktline.stage.compiled.divide import Division, divide
from taktline.stage.split_backward import Pending
from taktline.stage.split_recipe import Inside

_log = logging.getLogger("taktline")

current_node = private("torch._C._current_autograd_node", "a compiled backward in halves")

Call: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes a list of arguments and empties it, so that each can be freed after its use."""

Compile: TypeAlias = Callable[[fx.GraphModule, Sequence[Any], Sequence[int]], Call]
"""Compiles a graph for example arguments, whose numbers in the whole backward are given."""


@dataclass(frozen=True, slots=True)
class _Halves:
    division: Division
    first: Call
    second: Call | None
    """None if its gradients are computed and added one by one."""


class _Split:
    """Runs the halves for the weights of one node of the graph."""

    def __init__(self, halves: _Halves, weights: Mapping[int, torch.Tensor]) -> None:
        """``weights`` are by their places among the forward's arguments."""
        self._division = halves.division
        self._first = halves.first
        late = self._division.later
        self._early = [place for place in weights if place not in late]
        self._late = [weights[place] for place in late]
        # Added in W: together is quicker than by autograd. Those from I may be those of its input.
        self._weights = [(weights[place], True) for place in self._early]
        if halves.second is None:
            self._second = partial(_one_by_one(self._division), self._late)
        else:
            self._second = halves.second
            self._weights += zip(self._late, self._division.are_shared, strict=True)
        self._device_type = next(iter(weights.values())).device.type
        self._sums = Sums({place: weight for place, (weight, _) in enumerate(self._weights)})

    def run_first(self, arguments: list[Any], pending: Pending) -> Sequence[Any]:
        """The gradients that are not added here; ``pending`` takes over the second half."""
        division = self._division
        held = [arguments[i] for i in division.takes_second]
        taken = [arguments[i] for i in division.takes_first]
        arguments.clear()
        results = list(self._first(taken))
        count = len(results) - len(division.made)
        early = [results[place] for place in self._early]
        pending.take_over(self._late, [*held, *results[count:]], early, self._run_second)
        del results[count:]
        for place in self._early:
            results[place] = None
        return results

    def _run_second(self, held: list[Any], early: Sequence[Any]) -> None:
        if torch.is_autocast_enabled(self._device_type):  # the graph has its casts
            with torch.autocast(self._device_type, enabled=False):
                self._run_second(held, early)
            return
        enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # as inside of the engine; no_grad() is slower
        try:
            gradients = [*early, *self._second(held)]
            self._sums.add(gradients)
            for (weight, is_shared), gradient in zip(self._weights, gradients, strict=True):
                if gradient is not None:
                    add_to_grad(weight, gradient, is_shared)
        finally:
            torch.set_grad_enabled(enabled)


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
        self._on_cpu = all(x.is_cpu for x in example if isinstance(x, torch.Tensor))
        self._whole: Call | None = None
        # By the results that come later; None where none can.
        self._halves: dict[tuple[int, ...], _Halves | None] = {}
        self._latest: tuple[Inside, _Split | None] | None = None

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """The gradients of the forward's arguments, None where they are put off."""
        node = current_node()
        put_off: tuple[Pending, Inside] | None = getattr(node, "put_off", None)
        if put_off is not None:
            pending, inside = put_off
            if self._latest is None or self._latest[0] is not inside:
                self._latest = inside, self._split(inside)
            split = self._latest[1]
            if split is not None:
                return split.run_first(arguments, pending)
        if self._whole is None:
            # A compiler changes its graph.
            copied = fx.GraphModule(self._graph, deepcopy(self._graph.graph))
            self._whole = self._compiles(copied, self._example, range(len(self._example)))
        return self._whole(arguments)

    def _split(self, inside: Inside) -> _Split | None:
        if inside.edges != len(self._edges):
            return None
        weights = {self._edges[edge]: leaf for edge, leaf in inside.leaves.items()}
        halves = self._halves_for(tuple(weights)) if weights else None
        return None if halves is None else _Split(halves, weights)

    def _halves_for(self, later: tuple[int, ...]) -> _Halves | None:
        if later not in self._halves:
            made = self._made(later)
            if isinstance(made, str):
                _log.warning(
                    "%s: its compiled backward stays whole, so W is empty there: %s",
                    self._where,
                    made,
                )
                made = None
            self._halves[later] = made
        return self._halves[later]

    def _made(self, later: Collection[int]) -> _Halves | str | None:
        division = divide(self._graph, later)
        if division is None or isinstance(division, str):
            return division
        made = [node.meta["val"] for node in division.made]
        first = [self._example[i] for i in division.takes_first]
        second = [self._example[i] for i in division.takes_second]
        one_by_one = self._on_cpu and division.has_only_products
        try:
            return _Halves(
                division,
                self._compiles(division.first, first, division.takes_first),
                None
                if one_by_one
                else self._compiles(division.second, [*second, *made], division.takes_second),
            )
        except Exception as error:
            return f"its halves do not compile: {type(error).__name__}: {text_of(error)}"


def _one_by_one(division: Division) -> Callable[[Sequence[torch.Tensor], list[Any]], Any]:
    """A function of weights and held values, which adds each gradient as soon as it is computed.

    On a CPU, the memory of a gradient that was just added is still in the cache for the next one.
    """
    graph = fx.Graph()
    weights, held = graph.placeholder("weights"), graph.placeholder("held")
    copies: dict[fx.Node, fx.Node] = {}
    nodes = list(division.second.graph.nodes)
    results: Sequence[Any] = nodes[-1].args[0]
    for node in nodes:
        if node.op == "placeholder":
            copies[node] = graph.call_method("pop", (held, 0))
        elif node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_function":
                copies[node].target = _function(node.target)
        for place, result in enumerate(results):
            if result is node:
                weight = graph.call_function(getitem, (weights, place))
                graph.call_function(add_to_grad, (weight, copies[node], division.are_shared[place]))
    graph.output([])
    return fx.GraphModule(division.second, graph).forward


def _function(operation: Any) -> Any:
    """The function of torch that is an operation: the operation itself is slower to call."""
    name = operation.overloadpacket.__name__
    return getattr(torch, name, getattr(torch.Tensor, name, operation))
