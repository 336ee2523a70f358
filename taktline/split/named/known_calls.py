"""What was learned from calls, by the shapes and types of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from taktline import pytree
from taktline.split.arguments import Call
from taktline.split.named.forward_summary import Boundary, ForwardSummary, Path
from taktline.split.named.mutable import copied, is_constant
from taktline.split.named.placeholder import Absent, Placeholder

if TYPE_CHECKING:
    from taktline.split.named.direct_calls import DirectCalls
    from taktline.split.named.repeated_run import Prefix

Value = TypeVar("Value")

_SIZE = 64
"""More entries than a program has buckets of sequence lengths."""


class CallCache(dict[Hashable, Value]):
    """A dict that drops the entries which were not used for longest.

    >>> squares = CallCache()
    >>> [squares.find(number, lambda: number * number) for number in range(100)][-1]
    9801
    >>> len(squares), next(iter(squares))
    (64, 36)
    """

    def find(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key; ``make`` makes it if it is missing."""
        value = self.pop(key, None)
        if value is None:
            value = make()
        self.keep(key, value)
        return value

    def keep(self, key: Hashable, value: Value) -> None:
        """Put a value last."""
        self[key] = value
        if len(self) > _SIZE:
            del self[next(iter(self))]


def tensor_key(tensor: torch.Tensor) -> Any:
    """All that a forward can see of a tensor without its data."""
    plain = tensor.meta if isinstance(tensor, Placeholder) else tensor  # which answers faster
    return (plain.shape, plain.stride(), plain.dtype)


def cache_key(value: Any, of_tensor: Callable[[torch.Tensor], Any] = tensor_key) -> Any:
    """All that a forward can see of an argument without its data.

    Without pytree where possible: this runs in each call, for every unit before a stage.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[cache_key(part, of_tensor) for part in value])
    if kind is dict:
        return (kind, *[(key, cache_key(part, of_tensor)) for key, part in value.items()])
    if kind is Absent:
        return value
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if is_constant(value):
        return (kind, value)
    if kind is slice:
        return (
            kind,
            *[cache_key(part, of_tensor) for part in (value.start, value.stop, value.step)],
        )
    leaves, spec = pytree.tree_flatten(value)
    return kind if spec.is_leaf() else (spec, *[cache_key(leaf, of_tensor) for leaf in leaves])


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type in which autocast computes on a device; None if autocast is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@dataclass(slots=True)
class KnownCall:
    """What crosses the boundaries of a stage in calls with the same key, and how to repeat them."""

    entry: Boundary = field(default_factory=Boundary)
    """What comes from the stage before."""
    exit: Boundary = field(default_factory=Boundary)
    """What goes to the next stage."""
    summary: ForwardSummary = field(default_factory=ForwardSummary)
    """What the dry run with such arguments has seen."""
    absent: dict[int, Absent] = field(default_factory=dict)
    """For leaves of the model's arguments whose data no later stage needs: what to send instead."""
    is_checked: bool = False
    """Whether the first run was compared with the dry run."""
    writes: bool | None = None
    """Whether the stage changes received values in place; None if no call has shown it."""
    is_plain: bool = False
    """Whether the forward may be left out, as its calls depend on shapes and constants alone."""
    is_repeatable: bool = True
    """Whether there may be a prefix."""
    prefix: Prefix | None = None
    direct_calls: DirectCalls | None = None
    _placeholders: dict[Absent, Placeholder] = field(default_factory=dict)
    exits: tuple[Path, ...] = ()
    """The paths of the arguments that go to the next stage, in order."""

    @classmethod
    def of(cls, received: Call, device: torch.device) -> KnownCall:
        """A call of which nothing is known but the arguments of the model."""
        leaves = pytree.tree_leaves(received, is_leaf=_is_absent)
        return cls(
            is_plain=all(isinstance(x, (torch.Tensor, Absent)) or is_constant(x) for x in leaves),
            _placeholders={x: x.as_placeholder(device) for x in leaves if _is_absent(x)},
        )

    def follow(self, summary: ForwardSummary, stage: int) -> None:
        """Take over what a dry run has seen of a stage."""
        self.summary = summary
        if stage:
            self.entry = summary.boundaries[stage - 1]
        if stage < len(summary.boundaries):
            self.exit = summary.boundaries[stage]
        has_extras = self.entry.extras or self.exit.extras
        if has_extras or summary.changed or summary.reads_numbers or summary.draws:
            self.is_plain = False
        # A repeated run may have to begin again, which would draw or read numbers twice.
        has_numbers = self.entry.numbers or self.exit.numbers
        self.is_repeatable = not (has_numbers or (stage and summary.draws))

    def arguments(self, received: Call) -> Call:
        """The arguments of the model, with placeholders for those whose data has not come.

        With copies of those that the forward itself changes, as each stage does so anew.
        """
        if self._placeholders:
            placeholder = self._placeholders.__getitem__
            received = pytree.tree_map_only(Absent, placeholder, received, is_leaf=_is_absent)
        return copied(received, self.summary.written) if self.summary.written else received

    def handed_on(self, values: tuple[Any, ...], received: Call) -> tuple[Any, ...]:
        """Values for the next stage, with those arguments of the model whose data it needs."""
        if not self.absent:
            return values, *received
        leaves, spec = pytree.tree_flatten(received)
        for place, absent in self.absent.items():
            leaves[place] = absent
        return values, *pytree.tree_unflatten(leaves, spec)


def leaf_at(tree: Any, path: Path) -> Any:
    """The leaf at a path; None if the tree has no such path."""
    try:
        for key in path:
            tree = key.get(tree)
    except (LookupError, AttributeError, TypeError):
        return None
    return tree


def _is_absent(part: object) -> bool:
    return isinstance(part, Absent)
