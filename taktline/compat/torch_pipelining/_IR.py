"""A model cut at split points. All other names are from torch's module of this name.

Its stages take and return plain tensors, as torch's schedules send them. A stage of Taktline also
passes on the arguments of the model in their containers, so that each call may be of another kind.
Here all calls are like the example, which tells what the tensors are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from inspect import BoundArguments, signature
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.distributed import ProcessGroup

from taktline import pytree, split
from taktline.checks import check
from taktline.compat.torch_pipelining import of_torch
from taktline.compat.torch_pipelining._steps import as_in_torch
from taktline.compat.torch_pipelining.stage import build_stage
from taktline.errors import PartitionError, SignatureError
from taktline.meta import Signature
from taktline.split import SplitPoint, pipe_split
from taktline.split.pipe import joined
from taktline.split.recorded_stage import RecordedStage, StageProgram
from taktline.split.steps import Absent, Call, Value, filled, key_of, parts_in, without_cache
from taktline.text import counted


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
        """The tensors that the model returns, for any batch size."""
        stages = [stage for stage in self.split_gm.children() if isinstance(stage, FlatStage)]
        usual = stages[0].example
        example = _with_batch_size(usual, usual.signature.bind(*args, **kwargs))
        try:
            for stage in stages:
                stage.example = example
            return tuple(pytree.tree_leaves(super().forward(*args, **kwargs)))
        finally:
            for stage in stages:
                stage.example = usual

    _number_and_count_forward_stages = staticmethod(_torchs.Pipe._number_and_count_forward_stages)

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


class FlatStage(RecordedStage):
    """A stage whose neighbours are sent tensors alone.

    ``example`` has the arguments of the model with which it was recorded.
    """

    def __init__(self, stage: Any, example: BoundArguments) -> None:
        super().__init__(stage._cut, stage._stage)
        vars(self).update(vars(stage))
        self.example = example

    def returned(self) -> int:
        """How many tensors the stage returns; the last one returns the output of the model."""
        known, stage = self._cut.first, self._stage
        if known is None or stage + 1 == len(known):
            return 1
        return len(known[stage].plan.sent) + len(known[stage + 1].plan.arguments)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage."""
        received: tuple[Any, ...] = ()
        if self._stage == 0:
            given = self.example.signature.bind(*args, **kwargs)
            _require_like(given, self.example)
            program, call = self._program(given.args), self._call(given)
        else:
            program = self._program(args)
            received, call = _unpacked(program, args, self._stage)
        tensors: list[Any] = []
        key_of(call, tensors)
        if not program.holds(self, tensors, received):
            raise SignatureError(
                "the forward reads other numbers from its arguments than from the example, and "
                "takes another way; pass an example that is like all micro-batches, or use "
                "taktline.pipeline() and the schedules of Taktline"
            )
        if self._stage + 1 == self._cut.stages:
            return self._run(received, call)
        sent, *call = self._run(received, call)
        tensors = []
        key_of((*call,), tensors)
        own = dict(zip(parts_in(program.record.given, Value), tensors, strict=True))
        flat = (*sent, *(tensor for tensor in own.values() if type(tensor) is not Absent))
        return flat[0] if len(flat) == 1 else flat

    def _run(self, received: tuple[Any, ...], call: Call) -> Any:
        """Run this stage as one of Taktline."""
        args, kwargs = call if self._stage == 0 else ((received, *call), {})
        return super().forward(*args, **kwargs)

    def _call(self, given: BoundArguments) -> Call:
        return given.args, without_cache(self._cut.arguments[len(given.args) :], given.kwargs)

    def _program(self, args: tuple[Any, ...]) -> StageProgram:
        """What the stage runs for the example, in the present modes and on the present device."""
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        call = self._call(self.example)
        if tensors and not (tensors[0].is_cpu or tensors[0].is_meta):
            device = tensors[0].device
            call = pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), call)
        return self.program(call, ())[0]


def _unpacked(
    program: StageProgram, tensors: tuple[Any, ...], stage: int
) -> tuple[tuple[Any, ...], Call]:
    """The values from the stage before, and the arguments of the model."""
    record, plan = program.record, program.plan
    given = dict.fromkeys(parts_in(record.given, Value))
    needed = [*plan.received, *(value for value in given if value in plan.arguments)]
    if len(needed) != len(tensors):
        raise SignatureError(
            f"stage {stage} takes {counted(len(needed), 'tensor')} of stage {stage - 1}, and got "
            f"{len(tensors)}; pass what that stage of the same model returns"
        )
    values = {value: value.absent for value in given}
    values |= dict(zip(needed, tensors, strict=True))
    return tuple(tensors[: len(plan.received)]), filled(record.given, values)


def _with_batch_size(example: BoundArguments, given: BoundArguments) -> BoundArguments:
    """An example with the batch size of what is given: its rows, again and again or not all."""
    batch, wanted = (
        next(filter(None, map(_rows_of, pytree.tree_leaves(each.arguments))), 0)
        for each in (example, given)
    )
    if batch == wanted or not batch:
        return example

    def resized(leaf: Any) -> Any:
        if _rows_of(leaf) != batch:
            return leaf
        rows = torch.arange(wanted, device=leaf.device) % batch
        return leaf.detach()[rows].requires_grad_(leaf.requires_grad)

    arguments = pytree.tree_map(resized, dict(example.arguments))
    return BoundArguments(example.signature, OrderedDict(arguments))


def _rows_of(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, torch.Tensor) and leaf.dim() else 0


def _require_like(given: BoundArguments, example: BoundArguments) -> None:
    """Raise if arguments are of another kind than those of the example."""
    for name in {**example.arguments, **given.arguments}:
        found, known = (
            _signature(each.arguments.get(name, "missing")) for each in (given, example)
        )
        if text := known.difference(found.leaves, found.spec, name=name):
            raise known.misfit(
                found.leaves,
                f"{text} as in the example that the pipeline was made with: make every micro-batch "
                "like the example, call pipeline() with an example of what you need, or use "
                "taktline.pipeline() and the schedules of Taktline",
            )


def _signature(value: Any) -> Signature:
    leaves, tree = pytree.tree_flatten(value)
    return Signature.of([x.detach() if isinstance(x, torch.Tensor) else x for x in leaves], tree)
