"""Modules that mark where they are to be cut, and losses as modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any

from torch import nn

from taktline.errors import PartitionError
from taktline.split import SplitPoint, pipe_split

__all__ = [
    "LossWrapper",
    "MultiUseParamSpec",
    "MultiUseParameterConfig",
    "PipeSequential",
    "PipeSplitWrapper",
    "TrivialLossWrapper",
    "annotate_split_points",
]


class MultiUseParameterConfig(Enum):
    """What torch may do with a parameter of several stages; here each has it, and they are tied."""

    TRANSMIT = 1
    REPLICATE = 2


MultiUseParamSpec = MultiUseParameterConfig | dict[str, MultiUseParameterConfig]


class PipeSplitWrapper:
    """Where older programs look for the split points."""

    SplitPoint = SplitPoint


class PipeSequential(nn.Sequential):
    """A sequence that is cut between any two of its modules.

    >>> len(PipeSequential.from_sequential(nn.Sequential(nn.ReLU(), nn.ReLU())))
    2
    """

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """The same modules, with a cut between any two."""
        return PipeSequential(*[copy.copy(module) for module in sequential_instance])

    def forward(self, input: Any) -> Any:
        """What the sequence gives."""
        for place, module in enumerate(self):
            if place:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model with its loss; a subclass says in its forward how the two are connected."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """To be written by a subclass."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a forward() of its own that calls self.module and "
            "self.loss_fn, and returns the loss"
        )


class TrivialLossWrapper(LossWrapper):
    """The loss of a model with one input, against its targets.

    >>> import torch
    >>> TrivialLossWrapper(nn.Identity(), torch.dist)(torch.ones(1), torch.zeros(1))
    tensor(1.)
    """

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """The loss."""
        return self.loss_fn(self.module(x), targets)


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Mark submodules, by their names, to be cut before or after.

    >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
    >>> annotate_split_points(model, {"1": SplitPoint.BEGINNING})
    """
    for name, point in spec.items():
        submodule = attrgetter(name)(mod)
        if point not in tuple(SplitPoint):
            raise PartitionError(
                f"Unknown split point type. {name!r} needs SplitPoint.BEGINNING or SplitPoint.END, "
                f"not {point!r}"
            )
        submodule.forward = _marked(submodule.forward, point)


def _marked(forward: Callable[..., Any], point: SplitPoint) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        if point is SplitPoint.BEGINNING:
            pipe_split()
        output = forward(*args, **kwargs)
        if point is SplitPoint.END:
            pipe_split()
        return output

    return marked
