"""A stage's way through the forward of which nothing is known: it is noted for later calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.example import Args, Call, Kwargs
from taktline.split.named.course import Value
from taktline.split.named.layout import Layout
from taktline.split.named.placeholder import Placeholder
from taktline.split.named.program import Seen, versions_of
from taktline.split.named.recorded import refill, replayed
from taktline.split.named.script import Script, Step, written
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.stage_run import Given, Leave, StageRun

__all__ = ["FirstRun", "OtherTypes"]


class OtherTypes(BaseException):
    """Ends a forward whose placeholders have not the types of what came, to begin it anew."""

    def __init__(self, types: Mapping[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.types = types


class FirstRun(StageRun):
    """A forward of which nothing is known.

    ``types`` are the types that submodules of other stages really return, where something that is
    not to be seen here, such as mixed precision, changes them; ``last``, not to try others.
    """

    script: Script | None = None
    """The way to where the stage begins."""
    seen: list[Seen] | None = None
    """The calls of own submodules, if the forward may be left out."""

    def __init__(
        self,
        layout: Layout,
        stage: int,
        given: Given,
        *,
        types: Mapping[torch.dtype, torch.dtype],
        last: bool,
    ) -> None:
        super().__init__(layout, stage, given)
        self.order: list[str] = []
        """The calls of units, and of what is inside of units."""
        self._types = types
        self._last = last
        self._is_open = self._kind.is_open
        self._steps: list[Step] = []
        self._versions: dict[int, int] = {}
        self._coming: dict[int, int] = {}
        """The numbers of values that have come, by the ids of their placeholders, or their own."""
        if self._is_in and self._is_open:
            self.script = Script((), ())

    def note_inner(self, name: str) -> None:
        """Note a call of what is inside of a unit."""
        self.order.append(name)

    def before_own(self, unit: Any, args: Args, kwargs: Kwargs) -> Call:
        """The arguments for a unit of this stage, with what came from the stage before."""
        kind = type(unit).__name__
        if not self._is_in:
            if not self._begins(unit):
                raise PartitionError(
                    f"the forward calls a {kind} of stage {self._stage} before "
                    f"{self._layout.start(self._stage)!r}, with which the stage begins; every "
                    "micro-batch must take the same way through the stages"
                )
            self._enter((args, kwargs))
        self.order.append(unit.unit)
        self.is_inside = True
        self._given = (args, kwargs)
        args, kwargs = self.require_data(self._given, f"a {kind}")
        self._note_before(unit, args, kwargs)
        if self.seen is not None:
            self._versions = versions_of((*args, *kwargs.values()))
        return args, kwargs

    def note_own(self, unit: Any, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Note what a unit of this stage has returned."""
        self.is_inside = False
        super().note_own(unit, args, kwargs, output)
        if self._before is not None:
            refill(self._given, (args, kwargs))
        if self.seen is not None:
            after = versions_of((*args, *kwargs.values(), output))
            self.seen.append(Seen(unit, args, kwargs, self._versions, output, after))

    def call_foreign(self, probe: ShapeProbe, training: bool, args: Args, kwargs: Kwargs) -> Any:
        """Placeholders before this stage begins; raises :class:`Leave` where it ends."""
        if self._is_in:
            self.require_exit(probe)
            raise Leave(args, kwargs)
        self.order.append(probe.name)
        call = self.count(probe.name)
        for number, value in self._came_with(probe.name, call, is_output=False):
            placeholder = pytree.tree_leaves((args, kwargs))[value.leaf]
            if isinstance(placeholder, Placeholder):
                placeholder.value = self._fitting(placeholder, number, str(value))
                self._coming[id(placeholder)] = number
        given: Any = pytree.tree_map(lambda part: part, (args, kwargs))  # lists as they are now
        output = probe.output(args, kwargs, training=training, stage=0, device=self.device)
        if self._types:
            output = pytree.tree_map_only(Placeholder, self._typed, output)
        came = {
            value.leaf: number
            for number, value in self._came_with(probe.name, call, is_output=True)
        }
        if came:
            leaves, spec = pytree.tree_flatten(output)
            for leaf, number in came.items():
                leaves[leaf] = self._fitting(leaves[leaf], number, f"the output of {probe.name!r}")
                self._coming[id(leaves[leaf])] = number
            output = pytree.tree_unflatten(leaves, spec)
        self._steps.append(Step(probe, training, given[0], given[1], output))
        return replayed(output, probe.module, args, kwargs)

    def _came_with(self, unit: str, call: int, *, is_output: bool) -> list[tuple[int, Value]]:
        """What came of a call of a unit, with its number."""
        return [
            (number, value)
            for number, value in enumerate(self._kind.takes, self._entering)
            if value[:3] == (unit, call, is_output)
        ]

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Call a function of torch that is given placeholders."""
        output = super().call(func, args, kwargs)
        if not self._is_in:
            self._steps.append(Step(func, None, args, kwargs, output))
        return output

    def note_change(self) -> None:
        """A placeholder looks otherwise than when it was made, so a script cannot return it."""
        if not self._is_in:
            self._is_open = False

    def _enter(self, arguments: Any) -> None:
        """Give the placeholders among the arguments of the first unit their data."""
        self._is_in = True
        if self.numbers is not None:
            self.numbers.require_all_taken(self._stage)
        start = self._layout.start(self._stage)
        leaves, _ = pytree.tree_flatten_with_path(arguments)
        given = [(path, leaf) for path, leaf in leaves if path in self._kind.entering]
        if len(given) != self._entering:
            raise PartitionError(
                f"{start!r}, with which stage {self._stage} begins, waits for {len(given)} tensors "
                f"from the stage before, but {self._entering} came; every rank must cut the "
                "same model"
            )
        types: dict[torch.dtype, torch.dtype] = {}
        for number, (_, placeholder) in enumerate(given):
            if isinstance(placeholder, Placeholder):  # whose data has not come beside
                name_of = f"{start!r}, with which stage {self._stage} begins,"
                value = self._fitting(placeholder, number, name_of)
                if placeholder.dtype is not value.dtype:
                    types[placeholder.dtype] = value.dtype
                # Of a placeholder that is there twice, the last value counts.
                self._coming[id(placeholder)] = number
        if types and not self._last:
            raise OtherTypes({} if self._types else types)
        places = [
            (path, self._coming[id(leaf)]) for path, leaf in given if id(leaf) in self._coming
        ]
        if not types and self._is_open:
            self.script = written(self._steps, self._coming, places)
            if self.script and self._kind.is_plain and not torch.is_inference_mode_enabled():
                self.seen = []
        self._steps.clear()
        for _, placeholder in given:
            if isinstance(placeholder, Placeholder):
                placeholder.value = self._values[self._coming[id(placeholder)]]

    def _fitting(self, placeholder: Any, number: int, user: str) -> torch.Tensor:
        """A value that came, if it has the shape of its placeholder."""
        value = self._values[number]
        if placeholder.shape != value.shape:
            raise PartitionError(
                f"{user} waits for a tensor of the shape {list(placeholder.shape)} from the stage "
                f"before, but one of {list(value.shape)} came; every rank must cut the same model"
            )
        return value

    def _typed(self, placeholder: Placeholder) -> Placeholder:
        return placeholder.typed(self._types.get(placeholder.dtype, placeholder.dtype))
