"""The backward of a compiled graph: whole, or with the gradients of weights put off to W."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from taktline.errors import text_of
from taktline.stage.autograd_engine import add_all
from taktline.stage.compiled.divide import Division, divide
from taktline.stage.split_recipe import Inside

__all__ = ["Backward", "Compile", "PutOff"]

_log = logging.getLogger("taktline")

Call: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes a list of arguments and empties it, so that each can be freed after its use."""

Compile: TypeAlias = Callable[[fx.GraphModule, Sequence[Any], Sequence[int]], Call]
"""Compiles a graph for example arguments, whose numbers in the whole backward are given."""


class PutOff(Protocol):
    """Takes over the gradients that a node of the graph does not compute at once."""

    def take_over(self, weights: Sequence[torch.Tensor], held: list[Any], run: Call) -> None:
        """Compute the gradients of weights later, from the held values."""
        ...


@dataclass(frozen=True, slots=True)
class _Halves:
    division: Division
    first: Call
    second: Call


class Backward:
    """Called by autograd with saved values and the gradients of outputs.

    If the running node has an attribute ``put_off``, that object takes over the gradients of the
    weights that may wait.
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
        # By the results that come later; None where none can.
        self._halves: dict[tuple[int, ...], _Halves | None] = {}

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """The gradients of the forward's arguments, None where they are put off."""
        node = torch._C._current_autograd_node()
        put_off: tuple[PutOff, Inside] | None = getattr(node, "put_off", None)
        if put_off is not None:
            off, inside = put_off
            weights = self._weights(inside)
            halves = self._halves_for(tuple(weights)) if weights else None
            if halves is not None:
                return self._run_first(halves, arguments, weights, off)
        if self._whole is None:
            # A compiler changes its graph.
            copied = fx.GraphModule(self._graph, _copied(self._graph.graph))
            self._whole = self._compiles(copied, self._example, range(len(self._example)))
        return self._whole(arguments)

    def _weights(self, inside: Inside) -> dict[int, torch.Tensor]:
        """The weights that may wait, by their places among the forward's arguments."""
        if inside.edges != len(self._edges):
            return {}
        return {self._edges[edge]: leaf for edge, leaf in inside.leaves.items()}

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
        try:
            return _Halves(
                division,
                self._compiles(division.first, first, division.takes_first),
                self._compiles(division.second, [*second, *made], division.takes_second),
            )
        except Exception as error:
            return f"its halves do not compile: {type(error).__name__}: {text_of(error)}"

    def _run_first(
        self,
        halves: _Halves,
        arguments: list[Any],
        weights: dict[int, torch.Tensor],
        off: PutOff,
    ) -> Sequence[Any]:
        division = halves.division
        held = [arguments[i] for i in division.takes_second]
        taken = [arguments[i] for i in division.takes_first]
        arguments.clear()
        results = halves.first(taken)
        count = len(results) - len(division.made)
        off.take_over(
            [weights[i] for i in division.later], [*held, *results[count:]], halves.second
        )
        return _added(results[:count], weights)


def _added(results: Sequence[Any], weights: Mapping[int, torch.Tensor]) -> list[Any]:
    """Add to gradients that weights have, in few operations; returns the results that are left.

    Autograd would add them one by one.
    """
    left = list(results)
    buffers: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for place, weight in weights.items():
        known, new = weight.grad, left[place]
        if new is None or known is None or known.requires_grad or known.dtype != new.dtype:
            continue
        buffers.append(known)
        gradients.append(new)
        left[place] = None
    add_all(buffers, gradients)
    return left


def _copied(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    made.output(made.graph_copy(graph, copies))
    made.output_node().meta = dict(graph.output_node().meta)
    return made
