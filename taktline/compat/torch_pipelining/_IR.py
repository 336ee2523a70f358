"""A model cut at split points. All other names are from torch's module of this name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.distributed import ProcessGroup

from taktline import split
from taktline.checks import check
from taktline.compat.torch_pipelining import of_torch
from taktline.compat.torch_pipelining._errors import as_in_torch
from taktline.compat.torch_pipelining._flat_stages import FlatStage
from taktline.compat.torch_pipelining.stage import build_stage
from taktline.errors import PartitionError
from taktline.pytree import tree_leaves
from taktline.split import SplitPoint, pipe_split
from taktline.split.pipe import joined


def _unchanged(*_: Any) -> Callable[[Any], Any]:
    return lambda function: function


# Torch's module defines an operator, which a process can do only once; here it uses ours.
_operators = SimpleNamespace(_pipe_split=SimpleNamespace(default=pipe_split))
with (
    patch.multiple(torch.library, define=_unchanged, impl=_unchanged, register_fake=_unchanged),
    patch.object(torch.ops, "pippy", _operators),
):
    _torchs = of_torch("_IR")
# Torch's functions must use our markers, too.
_torchs.pipe_split, _torchs.SplitPoint = pipe_split, SplitPoint

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    def __getattr__(name: str) -> Any: ...

else:
    globals().update({k: v for k, v in vars(_torchs).items() if k not in globals()})


class Pipe(split.Pipe):
    """A model cut into stages; calling it returns all tensors of its output, in a tuple.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> pipe = pipeline(model, (torch.zeros(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    >>> pipe.num_stages, len(pipe(torch.zeros(2, 4)))
    (2, 1)
    """

    def forward(self, *args, **kwargs):
        """The tensors that the model returns."""
        return tuple(tree_leaves(super().forward(*args, **kwargs)))

    _number_and_count_forward_stages = staticmethod(_torchs.Pipe._number_and_count_forward_stages)

    _trace_with_export = staticmethod(_torchs.Pipe._trace_with_export)

    @staticmethod
    def _from_traced(
        mod: nn.Module,
        exported_program: ExportedProgram,
        multi_use_param_spec: Any = None,
        output_loss_value_spec=None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> Pipe:
        """A model cut with the example that it was exported with; its forward is recorded."""
        args, kwargs = exported_program.example_inputs or ((), {})
        return pipeline(mod, args, kwargs, split_policy=split_policy)

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
        """A stage to run in a schedule, once its module is moved to a device."""
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
    """Record the forward of a module, and cut it into stages; into one, if nothing says where.

    >>> pipeline(nn.ReLU(), (torch.zeros(2),)).num_stages
    1
    """
    if split_spec is None and split_policy is None:
        split_spec = {}
    for name in split_spec or ():
        attrgetter(name)(module)  # an AttributeError for a name that there is not, as in torch
    try:
        check("module", module, nn.Module, "an nn.Module", error=PartitionError)
        check("mb_args", mb_args, tuple, "a tuple of arguments", error=PartitionError)
        example = signature(module.forward).bind(*mb_args, **(mb_kwargs or {}))
        given = example.args, example.kwargs, split_spec, split_policy
        pipe = split.pipeline(module, *given)
    except PartitionError as error:
        raise as_in_torch(error) from error.__cause__
    stages = [FlatStage(stage, example) for stage in pipe.split_gm.children()]
    counts = [stage.returned() for stage in stages]
    return Pipe(joined(stages, (mb_args, mb_kwargs or {}), counts), len(stages), False, None)
