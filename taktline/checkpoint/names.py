"""Names of one tensor that has several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

__all__ = ["joined", "same", "tied_names"]


def same(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The later names of what has several, and the first one.

    >>> one = torch.ones(1)
    >>> same({"embed": one, "norm": torch.ones(1), "head": one})
    {'head': 'embed'}
    """
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in state.items()}
    return {name: known for name, known in names.items() if name != known}


def tied_names(ties: Iterable[Sequence[str]]) -> dict[str, str]:
    """The same for the names of tied weights, those of each in the order of its stages."""
    return {name: names[0] for names in ties for name in names[1:] if name != names[0]}


def joined(*several: Mapping[str, str]) -> dict[str, str]:
    """Names that stand for others, in one table: each with the one that stands for all of its like.

    >>> joined({"head": "embed"}, {"embed": "head", "out": "head"})
    {'head': 'embed', 'out': 'embed'}
    """
    above: dict[str, str] = {}

    def first(name: str) -> str:
        while name in above:
            name = above[name]
        return name

    for name, known in (pair for aliases in several for pair in aliases.items()):
        if (one := first(name)) != (other := first(known)):
            above[one] = other
    return {name: first(name) for name in above}
