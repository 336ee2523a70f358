"""The arguments of a call, and how users write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from taktline.errors import PartitionError

__all__ = ["Args", "Call", "Kwargs", "arguments_of"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]


def arguments_of(example: Any) -> Call:
    """An example as positional and keyword arguments.

    >>> arguments_of(((1, 2), {"scale": 3})), arguments_of((1, 2)), arguments_of({"scale": 3})
    (((1, 2), {'scale': 3}), ((1, 2), {}), ((), {'scale': 3}))
    """
    match example:
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
        case tuple():
            return example, {}
        case Mapping():
            return (), dict(example)
        case torch.Tensor():
            return (example,), {}
    raise PartitionError(
        "example must be a tuple of arguments, a dict of keyword arguments, or (args, kwargs), not "
        f"a {type(example).__name__}"
    )
