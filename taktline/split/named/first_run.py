"""The first run of a stage with arguments of some shapes: it records what later calls repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.arguments import Args, Call, Kwargs
from taktline.split.named.direct_calls import CallRecorder
from taktline.split.named.forward_summary import UnitTensor
from taktline.split.named.layout import Layout
from taktline.split.named.placeholder import Placeholder
from taktline.split.named.repeated_run import Prefix, Step, record_prefix
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.side_effects import apply_side_effects, refill
from taktline.split.named.stage_run import StageInput, StageRun


class OtherTypes(BaseException):
    """Ends a forward whose placeholders have other types than the received values."""

    def __init__(self, types: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.types = types


class FirstRun(StageRun):
    """A forward that records its prefix and the calls of its own units.

    ``types`` are the types that other stages really return where mixed precision, which does not
    show here, changes them. ``last`` is whether to accept types that differ from these.
    """

    prefix: Prefix | None = None
    recorder: CallRecorder | None = None
    """Sees the calls of own units, if the forward may be left out."""

    def __init__(
        self,
        layout: Layout,
        stage: int,
        given: StageInput,
        *,
        types: Mapping[torch.dtype, torch.dtype],
        last: bool,
    ) -> None:
        super().__init__(layout, stage, given)
        self.order: list[str] = []
        """The calls of units, and of modules inside of units."""
        self._types = types
        self._last = last
        self._is_repeatable = self._known.is_repeatable
        self._steps: list[Step] = []
        self._received: dict[int, int] = {}
        """The numbers of received values, by the ids of their placeholders, or their own."""
        if self._has_begun and self._is_repeatable:
            self.prefix = Prefix((), ())

    def note_inner(self, name: str) -> None:
        """Note a call of a module inside of a unit."""
        self.order.append(name)

    def before_own(self, unit: Any, args: Args, kwargs: Kwargs) -> Call:
        """The arguments of an own unit, with the data of the received values."""
        name = type(unit).__name__
        if not self._has_begun:
            if not self._is_at(self._start, unit):
                raise PartitionError(
                    f"the forward calls {name} of stage {self._stage} before {self._start!r}, with "
                    "which the stage begins; every micro-batch must take the same path through the "
                    "stages"
                )
            self._begin((args, kwargs))
        self.order.append(unit.unit)
        self.is_inside = True
        self._given = (args, kwargs)
        args, kwargs = self.require_data(self._given, f"a {name}")
        self._note_before(unit, args, kwargs)
        if self.recorder is not None:
            self.recorder.note_before((*args, *kwargs.values()))
        return args, kwargs

    def note_own(self, unit: Any, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Note the output of an own unit."""
        self.is_inside = False
        super().note_own(unit, args, kwargs, output)
        if self._before is not None:
            refill(self._given, (args, kwargs))
        if self.recorder is not None:
            self.recorder.note_after(unit, args, kwargs, output)

    def call_foreign(self, probe: ShapeProbe, training: bool, args: Args, kwargs: Kwargs) -> Any:
        """Placeholders before this stage begins; raises ``Leave`` where it ends."""
        if self._has_begun:
            raise self.leave(probe, args, kwargs)
        self.order.append(probe.name)
        call = self.count(probe.name)
        for value, number in self._received_from(probe.name, call, is_output=False):
            placeholder = pytree.tree_leaves((args, kwargs))[value.leaf]
            if isinstance(placeholder, Placeholder):
                placeholder.value = self._fitting(placeholder, number, str(value))
                self._received[id(placeholder)] = number
            elif value.leaf in probe.writes:
                raise PartitionError(
                    f"{probe.name!r} changes in place a value that stage {self._stage} computes, "
                    "too, and uses later; return a new tensor instead, or cut the model elsewhere"
                )
        given: Any = pytree.tree_map(lambda part: part, (args, kwargs))  # the call may change lists
        output = probe.output(args, kwargs, training=training, stage=0, device=self.device)
        if self._types:
            output = pytree.tree_map_only(Placeholder, self._typed, output)
        if came := self._received_from(probe.name, call, is_output=True):
            leaves, spec = pytree.tree_flatten(output)
            for (*_, leaf), number in came:
                leaves[leaf] = self._fitting(leaves[leaf], number, f"the output of {probe.name!r}")
                self._received[id(leaves[leaf])] = number
            output = pytree.tree_unflatten(leaves, spec)
        self._steps.append(Step(probe, training, given[0], given[1], output))
        return apply_side_effects(output, probe.module, args, kwargs)

    def _received_from(
        self, unit: str, call: int, *, is_output: bool
    ) -> list[tuple[UnitTensor, int]]:
        """The received arguments or outputs of a call of a unit, with their numbers."""
        return [
            (value, number)
            for number, value in enumerate(self._known.entry.extras, self._arguments)
            if value[:3] == (unit, call, is_output)
        ]

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        output = super().call(func, args, kwargs)
        if not self._has_begun:
            self._steps.append(Step(func, None, args, kwargs, output))
        return output

    def note_change(self) -> None:
        """Give up the prefix: it could not return a placeholder whose shape has changed since."""
        if not self._has_begun:
            self._is_repeatable = False

    def _begin(self, arguments: Any) -> None:
        """End the prefix, and give the placeholders among the first arguments their data."""
        self._has_begun = True
        if self.numbers is not None:
            self.numbers.require_all_taken(self._stage)
        leaves, _ = pytree.tree_flatten_with_path(arguments)
        given = [(path, leaf) for path, leaf in leaves if path in self._known.entry.arguments]
        if len(given) != self._arguments:
            raise PartitionError(
                f"{self._start!r}, with which stage {self._stage} begins, expects {len(given)} "
                f"tensors from the stage before, but got {self._arguments}; every rank must cut "
                "the same model"
            )
        types: dict[torch.dtype, torch.dtype] = {}
        for number, (_, placeholder) in enumerate(given):
            if isinstance(placeholder, Placeholder):
                name_of = f"{self._start!r}, with which stage {self._stage} begins,"
                value = self._fitting(placeholder, number, name_of)
                if placeholder.dtype is not value.dtype:
                    types[placeholder.dtype] = value.dtype
                # If a placeholder is there twice, the last value counts.
                self._received[id(placeholder)] = number
        if types and not self._last:
            raise OtherTypes({} if self._types else types)
        places = [
            (path, self._received[id(leaf)]) for path, leaf in given if id(leaf) in self._received
        ]
        if not types and self._is_repeatable:
            self.prefix = record_prefix(self._steps, self._received, places)
            if self.prefix and self._known.is_plain and not torch.is_inference_mode_enabled():
                self.recorder = CallRecorder(self._values)
        self._steps.clear()
        for _, placeholder in given:
            if isinstance(placeholder, Placeholder):
                placeholder.value = self._values[self._received[id(placeholder)]]

    def _fitting(self, placeholder: Any, number: int, user: str) -> torch.Tensor:
        """A received value; raises if its placeholder has another shape."""
        value = self._values[number]
        if placeholder.shape != value.shape:
            raise PartitionError(
                f"{user} expects a tensor of shape {list(placeholder.shape)} from the stage "
                f"before, but got {list(value.shape)}; every rank must cut the same model"
            )
        return value

    def _typed(self, placeholder: Placeholder) -> Placeholder:
        return placeholder.typed(self._types.get(placeholder.dtype, placeholder.dtype))
