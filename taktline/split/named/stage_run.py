"""One stage's way through the model's forward: from where values come in to where they go out.

::

    forward of the model:   embed   layer 0   layer 1   layer 2   layer 3   norm   head
    stage 1 of 3:           (…)     (…)       ▶ real    real      ▶ leave
                                              what stage 0 sent   what stage 2 needs

(…) are placeholders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.example import Args, Call, Kwargs
from taktline.split.named.checkpoints import Checkpoints
from taktline.split.named.course import Value
from taktline.split.named.kind import Kind
from taktline.split.named.layout import Layout
from taktline.split.named.numbers import Numbers, Sizes
from taktline.split.named.of_transformers import lists
from taktline.split.named.placeholder import Placeholder, resolved
from taktline.split.named.recorded import Before, Recorded, since
from taktline.split.named.shape_probe import ShapeProbe

__all__ = ["Given", "Leave", "StageRun"]


class Leave(BaseException):
    """Ends a forward where the next stage begins.

    Not an Exception: no handler in the forward is meant for it.
    """

    def __init__(self, args: Args, kwargs: Kwargs) -> None:
        super().__init__()
        self.arguments = (args, kwargs)


class Given(NamedTuple):
    """What one call of a stage is given."""

    values: Sequence[Any]
    """What comes from the stage before."""
    came: Call
    """The arguments of the model."""
    device: torch.device
    kind: Kind
    """What is known of such calls."""


class StageRun(Checkpoints, ABC):
    """The forward of one micro-batch in one stage."""

    mixed = True
    is_inside = False
    _lengths: Mapping[str, int] = MappingProxyType({})
    """How much was collected before a unit has run."""
    _before: Before | None = None
    """All else that there was, if it matters."""

    def __init__(self, layout: Layout, stage: int, given: Given) -> None:
        values, _, self.device, kind = given
        self.given = given
        self.opened = kind.opened
        self._layout = layout
        self._stage = stage
        self._values = values
        self._kind = kind
        if kind.asks or kind.asked:
            self.numbers = Numbers(self, values[-1] if kind.asked else None)
            self._sizes = Sizes(self) if kind.is_sized else None
        self._entering = len(values) - len(kind.takes) - (1 if kind.asked else 0)
        """How many values the stage begins with; the others come beside them."""
        self._is_in = stage == 0
        self._calls: dict[str, int] = {}
        """How often each unit was called, as far as it matters."""
        if kind.sends or not self.repeats:
            self._caught: dict[Value, torch.Tensor] = {}
            self._unsure: set[Value] = set()

    def is_open(self, checkpoint: int) -> bool:
        """Whether it has units of other stages in it, which cannot run again."""
        return not self._is_in or super().is_open(checkpoint)

    def is_foreign(self, unit: Any) -> bool:
        """Whether a unit of this stage is called for another one, which has it, too."""
        if self._is_in:
            return unit.ends is not None and unit.ends == self._calls.get(unit.unit, 0)
        return not self._begins(unit) and len(self._layout.homes[unit.unit]) > 1

    def _begins(self, unit: Any) -> bool:
        """Whether the stage begins with this call of a unit."""
        return unit.begins is not None and unit.begins == self._calls.get(unit.unit, 0)

    def call_early(self, unit: Any, args: Args, kwargs: Kwargs) -> Any:
        """What a unit of this stage returns that is called for another one."""
        probe = self._layout.probes[unit.unit]
        return self.call_foreign(probe, unit.training, args, kwargs)

    @abstractmethod
    def call_foreign(self, probe: ShapeProbe, training: bool, args: Args, kwargs: Kwargs) -> Any:
        """What a unit of another stage returns; raises :class:`Leave` where this stage ends."""

    def note_own(self, unit: Any, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Keep what later stages need of what a unit of this stage was given and has returned."""
        call = self.count(unit.unit)
        if self._lengths:
            output = Recorded(output, since(self._lengths))
        if self._before is not None:
            output = self._before.left(output)
        if self.numbers is not None:
            leaves = pytree.tree_leaves(output)
            self._layout.probes[unit.unit].note_sizes(leaves, self.numbers)
            for leaf in leaves:
                self.numbers.note(leaf)
        for value in self._kind.sends:
            if value.unit == unit.unit and value.call == call:
                leaves = pytree.tree_leaves(output if value.is_output else (args, kwargs))
                self._caught[value] = leaves[value.leaf]
                if self.is_kept:
                    self._unsure.add(value)

    def _note_before(self, unit: Any, args: Args, kwargs: Kwargs) -> None:
        """Note what there is before a unit runs, to see what it leaves behind."""
        self._lengths = {key: len(part) for key, part in lists().items()}
        leaves_more = self._layout.probes[unit.unit].leaves_more
        self._before = Before(unit.unit, unit, args, kwargs) if leaves_more else None

    def count(self, unit: str) -> int:
        """Which call of a unit this is."""
        call = self._calls.get(unit, 0)
        self._calls[unit] = call + 1
        return call

    def beside(self) -> tuple[torch.Tensor, ...]:
        """What goes to the next stage beside what it begins with."""
        came = dict(zip(self._kind.takes, self._values[self._entering :], strict=False))
        sent = [self._sent(value, came) for value in self._kind.sends]
        if self._kind.asks:
            sent.append(self.numbers.sent(self._kind.asks, self.device))
        return tuple(sent)

    def _sent(self, value: Value, came: Mapping[Value, Any]) -> torch.Tensor:
        sent = self._caught.get(value, came.get(value))
        if sent is None and value in self._kind.looks:
            look = self._kind.looks[value]
            return torch.zeros(look.shape, dtype=look.dtype, device=self.device)
        if not isinstance(sent, torch.Tensor):
            raise PartitionError(
                f"a later stage needs {value}, which stage {self._stage} has not come to; every "
                "micro-batch must take the same way through the stages"
            )
        if value in self._unsure and torch.is_grad_enabled() and not sent.requires_grad:
            raise PartitionError(
                f"a later stage needs {value}, which lies inside of a checkpoint and has no "
                "gradient there; checkpoint with use_reentrant=False"
            )
        return sent

    def __enter__(self) -> Self:
        if self.numbers is not None:
            self.numbers.__enter__()
            if self._sizes is not None:
                self._sizes.__enter__()
        return super().__enter__()

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        if self.numbers is not None:
            if self._sizes is not None:
                self._sizes.__exit__(*details)
            self.numbers.__exit__(*details)

    def require_data(self, tree: Any, user: str) -> Any:
        """A tree with the data of all its placeholders."""
        if type(tree) is torch.Tensor:
            return tree
        tree = resolved(tree)
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Placeholder):
                raise PartitionError(
                    f"{user} in stage {self._stage} uses a value of {leaf.maker!r}, which has not "
                    f"come with what the stage begins with; {self._layout.advice}"
                )
        return tree

    def require_exit(self, probe: ShapeProbe) -> None:
        """Raise unless the next stage begins with a submodule."""
        start = self._layout.start(self._stage + 1)
        if start is None or start.unit != probe.name:
            raise PartitionError(
                f"the forward calls {probe.name!r}, which lies in stage "
                f"{min(self._layout.homes[probe.name])}, in the middle of stage {self._stage}; "
                f"{self._layout.advice}"
            )

    def require_handed_on(self, arguments: Any) -> Any:
        """The arguments with which the next stage begins, with their data."""
        return self.require_data(arguments, repr(self._layout.start(self._stage + 1)))

    def finish(self, output: Any) -> Any:
        """The output of the model, after its last stage."""
        if not self._is_in or self._stage < self._layout.stages - 1:
            start = self._layout.start(self._stage + (1 if self._is_in else 0))
            raise PartitionError(
                f"the forward of {self._layout.kind.__name__} has ended without a call of "
                f"{start!r}; every micro-batch must take the same way through the stages"
            )
        return self.require_data(output, "the output of the model")
