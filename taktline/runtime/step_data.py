"""The data of one step: the batch that comes in, its micro-batches, outputs and losses.

And all that its program is made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from taktline import pytree
from taktline.errors import BatchError
from taktline.meta import Signature, flatten
from taktline.plan import Plan
from taktline.runtime.fingerprint import digest_of, words_of
from taktline.runtime.microbatch import (
    batch_size_of,
    bounds,
    size_of,
    split_args_kwargs_into_chunks,
    split_value,
)
from taktline.runtime.random_numbers import Drawing, Seeded, seeded
from taktline.side_values import handed_on, opened
from taktline.stage import PipelineStage
from taktline.text import counted
from taktline.transport import Transport


@dataclass(frozen=True, slots=True)
class Cutter:
    """How a schedule cuts batches."""

    microbatches: int
    args_spec: tuple[Any, ...] | None = None
    kwargs_spec: dict[str, Any] | None = None
    target_spec: Any = None
    """With a spec of its own, the target may have other rows than the batch."""
    fewer: bool = False
    """Whether a batch with fewer rows is cut into fewer micro-batches."""

    def parts(self, rows: int) -> int:
        """The number of micro-batches of a batch with ``rows``; 0 stands for unknown."""
        return min(self.microbatches, rows) if self.fewer and rows else self.microbatches


@dataclass(slots=True)
class Batch:
    """The arguments and target of a step, whole or as micro-batches; a rank uses its part."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    arg_mbs: Sequence[tuple[Any, ...]] | None = None
    kwarg_mbs: Sequence[dict[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None
    cutter: Cutter = Cutter(1)

    def arguments(self, rows: int) -> tuple[Sequence[Sequence[Any]], Sequence[Mapping[str, Any]]]:
        """Positional and keyword arguments of each micro-batch of a batch with ``rows``."""
        cutter = self.cutter
        parts, count = cutter.parts(rows), cutter.microbatches
        args, kwargs = split_args_kwargs_into_chunks(
            self.args, self.kwargs, parts, cutter.args_spec, cutter.kwargs_spec
        )
        if self.arg_mbs is not None:
            args = _ready("arg_mbs", self.arg_mbs, count, whole=bool(self.args))
        if self.kwarg_mbs is not None:
            kwargs = _ready("kwarg_mbs", self.kwarg_mbs, count, whole=bool(self.kwargs))
        return args, kwargs

    def targets(self, rows: int) -> Sequence[Any] | None:
        """The target of each micro-batch, cut like a batch with ``rows``; None: no target.

        >>> flat = Batch(target=torch.arange(6), cutter=Cutter(2))  # two a row
        >>> [part.tolist() for part in flat.targets(3)]
        [[0, 1, 2, 3], [4, 5]]
        """
        cutter = self.cutter
        if self.target_mbs is not None:
            whole = self.target is not None
            return _ready("target_mbs", self.target_mbs, cutter.microbatches, whole=whole)
        if self.target is None:
            return None
        size, parts, spec = self.target_size(), cutter.parts(rows), cutter.target_spec
        each = size // rows if rows and size and size % rows == 0 else 1
        if rows > size > 0 and rows % size == 0:
            _require_aligned(rows, size, parts)
        return split_value(self.target, parts, spec=spec, name="target", each=each)

    def require_whole(self, rows: int) -> None:
        """Raise if the batch runs as fewer micro-batches, but some of it came as micro-batches."""
        parts = self.cutter.parts(rows)
        if parts == self.cutter.microbatches:
            return
        for name in ("arg_mbs", "kwarg_mbs", "target_mbs"):
            chunks = getattr(self, name)
            if chunks is not None:
                raise BatchError(
                    f"{name} has {counted(len(chunks), 'micro-batch')}, but the batch has "
                    f"{counted(rows, 'row')} and runs as {parts}; pass all of it whole, or all of "
                    "it as micro-batches"
                )

    def size(self) -> int:
        """The rows of the batch; 0 if unknown."""
        specs = self.cutter.args_spec, self.cutter.kwargs_spec
        return batch_size_of(self.args, self.kwargs, *specs) or 0

    def target_size(self) -> int:
        """The rows of the target; 0 if unknown."""
        return size_of(self.target, spec=self.cutter.target_spec, name="target")

    def compared(self, parts: Sequence[str]) -> tuple[Any, Any]:
        """The arguments and targets that ranks compare; None where nothing was given."""
        given = {"args": self.args or self.arg_mbs, "kwargs": self.kwargs or self.kwarg_mbs}
        arguments = {name: value for name, value in given.items() if name in parts and value}
        target = self.target if self.target_mbs is None else self.target_mbs
        return arguments or None, target if "target" in parts else None

    def whole(self) -> int:
        """A digest of arguments and target, by which ranks see that they got the same kind.

        0 if there are no arguments.
        """
        if not (self.args or self.kwargs or self.arg_mbs or self.kwarg_mbs):
            return 0
        leaves, spec = pytree.tree_flatten((self.target, self.target_mbs))
        return digest_of([str(self.digest()), *map(_description, leaves), str(spec)])

    def digest(self) -> int:
        """A digest of shapes, types and plain values, which decide what crosses boundaries."""
        rest = (self.kwargs, self.arg_mbs, self.kwarg_mbs)
        if not any(rest) and all(type(value) is torch.Tensor for value in self.args):
            return digest_of(map(_description, self.args))  # the usual case, without the pytree
        leaves, spec = pytree.tree_flatten((self.args, *rest))
        return digest_of([*map(_description, leaves), str(spec)])


def _require_aligned(rows: int, size: int, parts: int) -> None:
    """Raise if the rows of one entry of the target would get into two micro-batches."""
    each = rows // size
    if bounds(rows, parts) != [each * bound for bound in bounds(size, parts)]:
        raise BatchError(
            f"the target has one entry for {each} rows of the batch, and {rows} rows in "
            f"{counted(parts, 'micro-batch')} would split some; use a number of micro-batches that "
            f"divides {size}"
        )


def _ready(name: str, chunks: Sequence[Any], count: int, *, whole: bool) -> Sequence[Any]:
    """Micro-batches from the caller; ``whole`` is whether the whole batch was given, too."""
    if whole:
        raise BatchError(f"pass {name} or the whole batch, not both")
    if len(chunks) != count:
        raise BatchError(
            f"{name} has {counted(len(chunks), 'micro-batch')}, but the schedule runs {count}; "
            f"pass {count}"
        )
    return chunks


def _description(leaf: object) -> str:
    """A leaf's type, and its value if it is plain; different values have different texts."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}{leaf.requires_grad}"
    return " ".join(words_of(leaf))


@dataclass(slots=True)
class Feed:
    """The micro-batches of a step on one rank, and their results."""

    trains: bool = False
    """Whether the step runs backward, too."""
    finalizes: bool = True
    """Whether the gradients of sharded stages are reduced at its end."""
    arguments: Sequence[Sequence[Any]] = ()
    keywords: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    loss_keywords: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 0
    """The rows of the batch, agreed on by all ranks; 0 if unknown."""
    microbatches: int = 0
    outputs: dict[int, Any] | None = None
    """Outputs of the last stage; None if the caller does not want them."""
    scale: float = 1.0
    """The weight of every micro-batch's loss in the gradient."""
    scales: Sequence[float] | None = None
    """The weight of each loss of the loss function, where they differ."""
    row_scales: Sequence[float] | None = None
    """The weight of each loss that stages add, where micro-batches differ in size."""
    grad_scale: float = 1.0
    """Multiplies every gradient, so that none underflows in half precision."""
    counts: torch.Tensor | None = None
    """The product of these for each micro-batch, in a buffer on the device: for the loss, and for
    losses that stages add. Only in a captured step, which is replayed with other numbers."""
    shares: bool = False
    """Whether every rank gets the losses."""
    wants_losses: bool = False
    """Whether the caller wants the losses."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    aux_losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """The sum of the losses that this rank's stages add, for each micro-batch."""
    observed: list[list[tuple[Any, Any]]] = field(default_factory=list)
    """Statistics from the modules of each forward, applied at the end of the step."""
    number: int = 0
    """The number of the training step, for seeds."""
    late: Callable[[Feed], None] | None = None
    """Fills a feed with the losses of all ranks, and waits for those that have not ended the step.

    None after a step that all ranks have ended."""

    def clear(self) -> None:
        """Reset every field."""
        self.__init__()


@dataclass(frozen=True, slots=True)
class Binding:
    """All that the program of a step is made from."""

    plan: Plan
    stages: Mapping[int, PipelineStage]
    transport: Transport
    feed: Feed
    loss_fn: Callable[..., torch.Tensor] | None
    seed: int | None
    trains: bool
    sends_may_wait: bool
    """Whether the plan cannot deadlock where a send waits until its receive is posted."""
    most_sends: int | None
    """How many messages of a rank may be under way; None: any number."""
    drawing: Drawing | None
    """Where all stages run in one thread: observes random numbers, and separates those of ranks."""
    seeded: Seeded = seeded
    """Sets the seed for a stage and micro-batch."""
    check_finite: bool = False
    """Whether to raise where a value is not finite."""
    any_order: bool = False
    """Whether forwards may run in any order: none changes what another one reads."""


@dataclass(slots=True)
class Signatures:
    """The values that cross this rank's boundaries: for each stage, a signature per micro-batch."""

    arriving: dict[int, list[Signature]] = field(default_factory=dict)
    leaving: dict[int, list[Signature]] = field(default_factory=dict)
    routes: Mapping[str, int] = field(default_factory=dict)
    """The last stage that gets each skip."""

    def along(self, routes: Mapping[str, int]) -> Signatures:
        """The same signatures with skips that end at their route, and not at the last stage."""
        return Signatures(
            {s: [_without(x, routes, s - 1) for x in table] for s, table in self.arriving.items()},
            {s: [_without(x, routes, s) for x in table] for s, table in self.leaving.items()},
            routes,
        )


def _without(signature: Signature, routes: Mapping[str, int], stage: int) -> Signature:
    """The signature of a stage's output, without skips that no later stage gets."""
    if signature.spec is None:
        return signature
    arguments, skips = opened(pytree.tree_unflatten(signature.leaves, signature.spec))
    leaves, spec = flatten(handed_on(arguments, skips, routes, stage))
    return Signature(tuple(leaves), spec)
