"""One batch as it is given to a step: whole, or as micro-batches that are cut already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from taktline import pytree
from taktline.errors import BatchError
from taktline.runtime.digest import digest_of
from taktline.runtime.leaves import bounds
from taktline.runtime.microbatch import (
    batch_size_of,
    size_of,
    split_args_kwargs_into_chunks,
    split_value,
)
from taktline.text import counted

__all__ = ["Batch", "Cutter"]


@dataclass(frozen=True, slots=True)
class Cutter:
    """How a schedule cuts batches."""

    microbatches: int
    args_spec: tuple[Any, ...] | None = None
    kwargs_spec: dict[str, Any] | None = None
    target_spec: Any = None
    """Given one, the rows of a target need not be those of the batch."""
    fewer: bool = False
    """Whether a batch with fewer rows is cut into fewer."""
    refusal: BatchError | None = None
    """Why the batch cannot be cut, if that is known: raised where all ranks hear of it."""

    def parts(self, rows: int) -> int:
        """Into how many a batch with so many rows is cut; 0 rows: that is not to be seen.

        >>> Cutter(8, fewer=True).parts(6)
        6
        """
        return min(self.microbatches, rows) if self.fewer and rows else self.microbatches


@dataclass(slots=True)
class Batch:
    """What a step works on; a rank uses its own share of it.

    >>> batch = Batch(args=(torch.arange(6),))
    >>> batch.arguments(Cutter(microbatches=3))[0][2]
    (tensor([4, 5]),)
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    arg_mbs: Sequence[tuple[Any, ...]] | None = None
    kwarg_mbs: Sequence[dict[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None

    def without_args(self) -> Batch:
        """As a rank without the first stage sees it: keyword arguments are for its own stages."""
        return Batch((), self.kwargs, self.target, None, self.kwarg_mbs, self.target_mbs)

    def arguments(
        self, cutter: Cutter
    ) -> tuple[Sequence[Sequence[Any]], Sequence[Mapping[str, Any]]]:
        """Positional and keyword arguments of each micro-batch."""
        parts, count = cutter.parts(self.size(cutter)), cutter.microbatches
        args, kwargs = split_args_kwargs_into_chunks(
            self.args, self.kwargs, parts, cutter.args_spec, cutter.kwargs_spec
        )
        if self.arg_mbs is not None:
            args = _ready("arg_mbs", self.arg_mbs, count, whole=bool(self.args))
        if self.kwarg_mbs is not None:
            kwargs = _ready("kwarg_mbs", self.kwarg_mbs, count, whole=bool(self.kwargs))
        return args, kwargs

    @property
    def has_target(self) -> bool:
        """Whether there is something to compare outputs with."""
        return self.target is not None or self.target_mbs is not None

    def targets(self, cutter: Cutter, rows: int) -> Sequence[Any] | None:
        """The target of each micro-batch, cut where a batch of so many rows is; None: no target.

        >>> flat = Batch(target=torch.arange(6))  # two a row
        >>> [part.tolist() for part in flat.targets(Cutter(2), 3)]
        [[0, 1, 2, 3], [4, 5]]
        """
        if self.target_mbs is not None:
            whole = self.target is not None
            return _ready("target_mbs", self.target_mbs, cutter.microbatches, whole=whole)
        if self.target is None:
            return None
        size, parts, spec = self.target_size(cutter), cutter.parts(rows), cutter.target_spec
        each = size // rows if rows and size and size % rows == 0 else 1
        if rows > size > 0 and rows % size == 0:
            _require_aligned(rows, size, parts)
        return split_value(self.target, parts, spec=spec, name="target", each=each)

    def require_whole(self, cutter: Cutter, rows: int) -> None:
        """Raise if a batch that is cut into fewer has parts that are cut already."""
        parts = cutter.parts(rows)
        if parts == cutter.microbatches:
            return
        for name in ("arg_mbs", "kwarg_mbs", "target_mbs"):
            chunks = getattr(self, name)
            if chunks is not None:
                raise BatchError(
                    f"{name} has {counted(len(chunks), 'micro-batch')}, but the batch has "
                    f"{counted(rows, 'row')} and runs as {parts}; give all of it whole, or all of "
                    "it as micro-batches"
                )

    def size(self, cutter: Cutter) -> int:
        """Its size along the micro-batches; 0 where that is not to be seen."""
        if cutter.refusal is not None:
            raise cutter.refusal
        return batch_size_of(self.args, self.kwargs, cutter.args_spec, cutter.kwargs_spec) or 0

    def target_size(self, cutter: Cutter) -> int:
        """The size of the target along the micro-batches; 0 where that is not to be seen."""
        return size_of(self.target, spec=cutter.target_spec, name="target")

    def compared(self, parts: Sequence[str]) -> tuple[Any, Any]:
        """What ranks compare of their arguments and targets; None where nothing was given."""
        arguments = {
            name: value
            for name, value in (
                ("args", self.args or self.arg_mbs),
                ("kwargs", self.kwargs or self.kwarg_mbs),
            )
            if name in parts and value
        }
        target = self.target if self.target_mbs is None else self.target_mbs
        return arguments or None, target if "target" in parts else None

    def look(self) -> int:
        """A digest of shapes, types and plain values, on which depends what boundaries see."""
        rest = (self.kwargs, self.arg_mbs, self.kwarg_mbs)
        if not any(rest) and all(type(value) is torch.Tensor for value in self.args):
            return digest_of(map(_look, self.args))  # the usual case: spare it the pytree
        leaves, spec = pytree.tree_flatten((self.args, *rest))
        return digest_of([*map(_look, leaves), str(spec)])


def _require_aligned(rows: int, size: int, parts: int) -> None:
    """Raise if rows that belong to one entry of the target would get into two micro-batches."""
    each = rows // size
    if bounds(rows, parts) != [each * bound for bound in bounds(size, parts)]:
        raise BatchError(
            f"the target has one entry for {each} rows of the batch, and {rows} rows in "
            f"{counted(parts, 'micro-batch')} would part some of them; let the number of "
            f"micro-batches divide {size}"
        )


def _ready(name: str, chunks: Sequence[Any], count: int, *, whole: bool) -> Sequence[Any]:
    """Micro-batches that are cut already; ``whole`` is whether the batch was given, too."""
    if whole:
        raise BatchError(f"{name} and the whole batch were given; give one of them")
    if len(chunks) != count:
        raise BatchError(
            f"{name} has {counted(len(chunks), 'micro-batch')}, but the schedule runs {count}; "
            f"give {count}"
        )
    return chunks


def _look(leaf: object) -> str:
    """A leaf's type and, if it is plain, its value; all that two different ones differ in."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}{leaf.requires_grad}"
    if type(leaf) is float:
        return leaf.hex()
    if type(leaf) is int:
        return hex(leaf)
    return repr(leaf) if leaf is None or type(leaf) in (bool, str) else str(type(leaf))
