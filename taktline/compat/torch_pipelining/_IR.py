"""A traced model, cut into stages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from taktline import split
from taktline.compat.torch_pipelining._unflatten import _outline_submodules
from taktline.compat.torch_pipelining._utils import PipeInfo
from taktline.compat.torch_pipelining._wrappers import *  # noqa: F403
from taktline.split import SplitPoint, pipe_split

__all__ = [
    "Pipe",
    "PipeInfo",
    "SplitPoint",
    "_outline_submodules",
    "annotate_split_points",  # noqa: F405
    "get_submod_name",
    "pipe_split",
    "pipeline",
]

logger = logging.getLogger("torch.distributed.pipelining._IR")

PP_SUBMOD_PREFIX = "submod_pp"

# What a split policy puts into a graph.
aten_pipe_split_alias = torch.ops.taktline.pipe_split.default


def get_submod_name(stage_idx: int) -> str:
    """The name of a stage's module in a pipe.

    >>> get_submod_name(3)
    'submod_pp_3'
    """
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


class Pipe(split.Pipe):
    """A model in pieces; calling it gives all tensors of its output, in a tuple.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> pipe = pipeline(model, (torch.zeros(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    >>> pipe.num_stages, len(pipe(torch.zeros(2, 4)))
    (2, 1)
    """

    def __init__(
        self, split_gm: fx.GraphModule, num_stages: int, has_loss_and_backward: bool, loss_spec
    ):
        super().__init__(split_gm, num_stages, has_loss_and_backward, loss_spec)

    def forward(self, *args, **kwargs):
        """The tensors that the model gives."""
        return tuple(tree_leaves(super().forward(*args, **kwargs)))

    @staticmethod
    def _number_and_count_forward_stages(gm: fx.GraphModule) -> int:
        """How many stages there are."""
        names = {str(node.target) for node in gm.graph.nodes if node.op == "call_module"}
        return sum(name.startswith(f"{PP_SUBMOD_PREFIX}_") for name in names)

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> Pipe:
        """A model cut where it calls :func:`pipe_split`, or where a policy says."""
        return pipeline(mod, example_args, example_kwargs, split_policy=split_policy)

    def build_stage(
        self, stage_index: int, device: torch.device, group: ProcessGroup | None = None
    ) -> Any:
        """A stage to run in a schedule, once its piece is moved to a device."""
        from taktline.compat.torch_pipelining.stage import build_stage

        super().build_stage(stage_index, device, group)
        module = self.get_stage_module(stage_index)
        return build_stage(module, stage_index, self.info(), device, group)

    def __repr__(self) -> str:
        return repr(self.split_gm)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a module with torch.export, and cut it into stages; into one, if nothing says where.

    >>> pipeline(nn.ReLU(), (torch.zeros(2),)).num_stages
    1
    """
    if split_spec is None and split_policy is None:
        split_spec = {}
    for name in split_spec or ():
        attrgetter(name)(module)  # an AttributeError for a name that there is not, as in torch
    pipe = split.pipeline(module, mb_args, mb_kwargs, split_spec, split_policy)
    return Pipe(pipe.split_gm, pipe.num_stages, pipe.has_loss_and_backward, pipe.loss_spec)
