"""The autograd graph, read from its leaves: which gradients can wait for the weights' half.

::

    output ◀── Addmm ◀── Relu ◀── Addmm ◀── x      the inputs' part: all that leads to x
                 ▲                  ▲
                 T ◀ weight         T ◀ weight     each parameter meets it at an intermediate

What comes to the intermediates in the first half is all that the second half needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

__all__ = [
    "_get_grad_fn_or_grad_acc",
    "construct_reverse_graph",
    "get_param_groups",
    "reverse_closure",
]

Reverse = Mapping[Node, Sequence[Node]]
Group = dict[str, Any]


def _get_grad_fn_or_grad_acc(t: torch.Tensor) -> Node | None:
    """The node where a tensor's gradient arrives; None if it has none.

    >>> _get_grad_fn_or_grad_acc(torch.zeros(1)) is None
    True
    """
    return get_gradient_edge(t).node if t.requires_grad else None


def construct_reverse_graph(roots: list[Node]) -> dict[Node, list[Node]]:
    """For each node below the roots, those that hand it a gradient.

    >>> x = torch.ones(1, requires_grad=True)
    >>> y = x * 2
    >>> [node.name() for node in construct_reverse_graph([y.grad_fn])[_get_grad_fn_or_grad_acc(x)]]
    ['MulBackward0']
    """
    reverse: defaultdict[Node, list[Node]] = defaultdict(list)
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    for node in waiting:
        for below, _ in node.next_functions:
            if below is None:
                continue
            reverse[below].append(node)
            if below not in seen:
                seen.add(below)
                waiting.append(below)
    return reverse


def reverse_closure(
    roots: Iterable[Node], target_nodes: set[Node], reverse_edges_dict: Reverse
) -> tuple[set[Node], set[Node]]:
    """All nodes above the roots up to, but without, the targets; and the targets reached."""
    waiting = [root for root in roots if root is not None]
    closure, reached = set(waiting), set[Node]()
    for node in waiting:
        for above in reverse_edges_dict.get(node, ()):
            if above in target_nodes:
                reached.add(above)
            elif above not in closure:
                closure.add(above)
                waiting.append(above)
    return closure, reached


def get_param_groups(
    inputs: list[Node], params: list[Node], reverse_edges_dict: Reverse
) -> list[Group]:
    """Parameters with the intermediates where they meet the inputs' part; no two groups share any.

    A parameter that meets it nowhere is in no group.
    """
    part, _ = reverse_closure(inputs, set(), reverse_edges_dict)
    return groups_meeting(part, set(), params, reverse_edges_dict)


def groups_meeting(
    part: set[Node], ends: set[Node], params: Sequence[Node], reverse: Reverse
) -> list[Group]:
    """The groups of parameters by where they meet a part of the graph, or come to its ends."""
    groups: list[Group] = []
    for param in params:
        closure, met = reverse_closure([param], part, reverse)
        met |= closure & ends
        if not met:
            continue
        joined = [group for group in groups if group["intermediates"] & met]
        group: Group = {"params": {param}, "intermediates": met}
        for other in joined:
            group["params"] |= other["params"]
            group["intermediates"] |= other["intermediates"]
        # In the place of the first of those that it joins.
        place = groups.index(joined[0]) if joined else len(groups)
        groups = [other for other in groups if other not in joined]
        groups.insert(place, group)
    return groups
