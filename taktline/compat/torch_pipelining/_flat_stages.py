"""Stages that take and return plain tensors, as torch's schedules send them.

A stage of Taktline also passes on the arguments of the model in their containers, so that each call
may be of another kind. Here all calls are like the example, which tells what the tensors are.
"""

from __future__ import annotations

from inspect import BoundArguments
from typing import Any

import torch

from taktline import pytree
from taktline.errors import SignatureError
from taktline.split.arguments import Absent, Call, Value, filled, key_of, parts_in, without_cache
from taktline.split.recorded_stage import RecordedStage, StageProgram
from taktline.text import counted


class FlatStage(RecordedStage):
    """A stage whose neighbours are sent tensors alone.

    tuple[Any, ...]:
        stage: has the modules and tensors.
        example: the arguments of the model with which it was recorded.
    """

    def __init__(self, stage: Any, example: BoundArguments) -> None:
        super().__init__(stage._cut, stage._stage)
        vars(self).update(vars(stage))
        self._example = example

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
            given = self._example.signature.bind(*args, **kwargs)
            _require_like(given, self._example)
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
        call = self._call(self._example)
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


def _require_like(given: BoundArguments, example: BoundArguments) -> None:
    """Raise if arguments are of another kind than those of the example."""
    for name in {**example.arguments, **given.arguments}:
        found, known = (_kinds(each.arguments.get(name, "missing")) for each in (given, example))
        if found == known:
            continue
        error = SignatureError(
            f"{name} is {_text(found)}, but the pipeline was made with {_text(known)}, which is "
            "fixed now: make every micro-batch like the example, call pipeline() with an example "
            "of what you need, or use taktline.pipeline() and the schedules of Taktline"
        )
        types = [[dtype for dtype, _ in each] for each in (found, known)]
        error.differs = "dtype" if types[0] != types[1] else "shape"
        raise error


def _kinds(value: Any) -> list[tuple[str, str]]:
    """The types and shapes of tensors, other leaves, and the containers around them."""
    leaves, tree = pytree.tree_flatten(value)
    kinds = [
        (f"a tensor of {leaf.dtype}", f" and shape {list(leaf.shape)}")
        if isinstance(leaf, torch.Tensor)
        else (repr(leaf), "")
        for leaf in leaves
    ]
    return kinds if tree.is_leaf() else [*kinds, (f"in {tree}", "")]


def _text(kinds: list[tuple[str, str]]) -> str:
    return ", ".join(map("".join, kinds))
