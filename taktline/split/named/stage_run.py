"""One micro-batch in one stage: a run of the model's forward from where values come in.

::

    forward of the model:   embed   layer 0   layer 1   layer 2   layer 3   norm   head
    stage 1 of 3:           (…)     (…)       ▶ runs    runs      ▶ leave
                                              values of stage 0   values for stage 2

(…) are placeholders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.arguments import Args, Call, Kwargs
from taktline.split.named.checkpoints import Checkpoints
from taktline.split.named.data_dependent import Numbers, Sizes
from taktline.split.named.forward_summary import Cut, UnitTensor
from taktline.split.named.known_calls import KnownCall, leaf_at
from taktline.split.named.layout import Layout
from taktline.split.named.placeholder import Placeholder, resolved
from taktline.split.named.shape_probe import ShapeProbe
from taktline.split.named.side_effects import StateBefore


class Leave(BaseException):
    """Ends a forward where the next stage begins.

    Not an Exception, so that no handler in the forward catches it.
    """

    def __init__(self, args: Args, kwargs: Kwargs) -> None:
        super().__init__()
        self.arguments = (args, kwargs)


class StageInput(NamedTuple):
    """What one call of a stage gets."""

    values: Sequence[Any]
    """The values from the stage before."""
    received: Call
    """The arguments of the model."""
    device: torch.device
    known: KnownCall


class StageRun(Checkpoints, ABC):
    """The forward of one micro-batch in one stage."""

    _modes: Sequence[Any] = ()
    """The modes of torch in which the forward runs."""
    _before: StateBefore | None = None
    """The state before an own unit runs, if the unit has side effects."""

    def __init__(self, layout: Layout, stage: int, given: StageInput) -> None:
        values, self._model_call, self.device, known = given
        self.opened = known.summary.opened
        self._layout = layout
        self._stage = stage
        self._start, self._end = layout.start(stage), layout.start(stage + 1)
        self._values = values
        self._known = known
        received_numbers = known.entry.numbers > 0
        if received_numbers or known.exit.numbers:
            self.numbers = Numbers(self, values[-1] if received_numbers else None)
            self._modes = [self.numbers, *([Sizes(self)] if known.summary.is_sized else [])]
        self._arguments = len(values) - len(known.entry.extras) - received_numbers
        """How many of the values are arguments of the stage's first unit; then come extras."""
        self._has_begun = stage == 0
        self._calls: dict[str, int] = {}
        """How often each unit was called, as far as it matters."""
        self._caught: dict[UnitTensor, torch.Tensor] = {}
        self._unsure: set[UnitTensor] = set()

    def run(self, forward: Callable[..., Any]) -> Any:
        """Run a forward; returns what the next stage needs, or the model's output."""
        args, kwargs = self._known.arguments(self._model_call)
        with self:
            try:
                output = forward(*args, **kwargs)
            except Leave as leave:
                return self._known.handed_on(self._packed(leave.arguments), self._model_call)
        return self._finish(output)

    def is_open(self, checkpoint: int) -> bool:
        """Whether a block has units of other stages, which cannot run again."""
        return not self._has_begun or super().is_open(checkpoint)

    def is_foreign(self, unit: Any) -> bool:
        """Whether this call of an own unit belongs to another stage that has the unit, too."""
        if self._has_begun:
            return self._is_at(self._end, unit)
        return not self._is_at(self._start, unit) and self._layout.is_shared(unit.unit)

    def _is_at(self, cut: Cut | None, unit: Any) -> bool:
        """Whether a cut is at this call of a unit."""
        name = unit.unit
        return cut is not None and cut.unit == name and cut.call == self._calls.get(name, 0)

    def call_early(self, unit: Any, args: Args, kwargs: Kwargs) -> Any:
        """Treat a call of an own unit as one of another stage's."""
        probe = self._layout.probes[unit.unit]
        return self.call_foreign(probe, unit.training, args, kwargs)

    @abstractmethod
    def call_foreign(self, probe: ShapeProbe, training: bool, args: Args, kwargs: Kwargs) -> Any:
        """The output of a foreign unit; raises :class:`Leave` where this stage ends."""

    def note_own(self, unit: Any, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Keep the arguments and outputs of an own unit that later stages need."""
        call = self.count(unit.unit)
        if self._before is not None:
            output = self._before.with_effects(output)
        if self.numbers is not None:
            leaves = pytree.tree_leaves(output)
            self._layout.probes[unit.unit].note_sizes(leaves, self.numbers)
            for leaf in leaves:
                self.numbers.note(leaf)
        for value in self._known.exit.extras:
            if value.unit == unit.unit and value.call == call:
                leaves = pytree.tree_leaves(output if value.is_output else (args, kwargs))
                self._caught[value] = leaves[value.leaf]
                if self.in_reentrant:
                    self._unsure.add(value)

    def _note_before(self, unit: Any, args: Args, kwargs: Kwargs) -> None:
        """Note the state before an own unit runs, to find its side effects."""
        leaves_more = self._layout.probes[unit.unit].leaves_more
        self._before = StateBefore(unit.unit, unit, args, kwargs) if leaves_more else None

    def count(self, unit: str) -> int:
        """The number of a call of a unit, from 0 up."""
        call = self._calls.get(unit, 0)
        self._calls[unit] = call + 1
        return call

    def _extras(self) -> list[torch.Tensor]:
        """The values for the next stage besides the arguments of its first unit."""
        entry, exit = self._known.entry, self._known.exit
        received = dict(zip(entry.extras, self._values[self._arguments :], strict=False))
        sent = [self._sent(value, received) for value in exit.extras]
        if exit.numbers:
            sent.append(self.numbers.sent(exit.numbers, self.device))
        return sent

    def _sent(self, value: UnitTensor, received: Mapping[UnitTensor, Any]) -> torch.Tensor:
        sent = self._caught.get(value, received.get(value))
        summary = self._known.summary
        if sent is None and summary.is_guessed and value in summary.shapes:
            # A micro-batch that takes another branch does not have this tensor.
            absent = summary.shapes[value]
            return torch.zeros(absent.shape, dtype=absent.dtype, device=self.device)
        if not isinstance(sent, torch.Tensor):
            raise PartitionError(
                f"a later stage needs {value}, which stage {self._stage} has not reached; every "
                "micro-batch must take the same path through the stages"
            )
        if value in self._unsure and torch.is_grad_enabled() and not sent.requires_grad:
            raise PartitionError(
                f"a later stage needs {value}, which is inside a checkpoint and has no gradient "
                "there; checkpoint with use_reentrant=False"
            )
        return sent

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return super().__enter__()

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        for mode in reversed(self._modes):
            mode.__exit__(*details)

    def require_data(self, tree: Any, user: str) -> Any:
        """A tree with the data of all its placeholders."""
        if type(tree) is torch.Tensor:
            return tree
        tree = resolved(tree)
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Placeholder):
                raise PartitionError(
                    f"{user} in stage {self._stage} uses a value of {leaf.maker!r}, which is not "
                    f"in the input of the stage; {self._layout.advice}"
                )
        return tree

    def leave(self, probe: ShapeProbe, args: Args, kwargs: Kwargs) -> Leave:
        """The end of this stage at a call of the next stage's first unit; raises at others."""
        if self._end is None or self._end.unit != probe.name:
            raise PartitionError(
                f"the forward calls {probe.name!r}, which is in stage "
                f"{min(self._layout.homes[probe.name])}, in the middle of stage {self._stage}; "
                f"{self._layout.advice}"
            )
        return Leave(args, kwargs)

    def _packed(self, arguments: Any) -> tuple[Any, ...]:
        """The values for the next stage, whose first unit gets these arguments."""
        known = self._known
        values = [leaf_at(arguments, path) for path in known.exits]
        if not values or not all(type(value) is torch.Tensor for value in values):
            leaves, _ = pytree.tree_flatten_with_path(arguments)
            crossing = [(path, leaf) for path, leaf in leaves if path in known.exit.arguments]
            known.exits = tuple(path for path, _ in crossing)
            values = [self.require_data(leaf, repr(self._end)) for _, leaf in crossing]
        if known.exit.extras or known.exit.numbers:
            values += self._extras()
        return tuple(values)

    def _finish(self, output: Any) -> Any:
        """The output of the model, after its last stage."""
        if not self._has_begun or self._stage < self._layout.stages - 1:
            raise PartitionError(
                f"the forward of {self._layout.model_class.__name__} ended without a call of "
                f"{self._end if self._has_begun else self._start!r}; every micro-batch must take "
                "the same path through the stages"
            )
        return self.require_data(output, "the output of the model")
