"""Millions of actions as NumPy columns, one for each field.

A row is one plain action. An overlapped pair is two neighbouring rows, the forward first, of which
the first is marked as ``joined`` with the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from taktline.plan.action import Action, Kind, Overlap

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def as_numbers(value: Any) -> npt.NDArray[Any] | None:
    """A number, or a list of them, as an array; None if it is anything else, or not finite."""
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError):  # a ragged list, or an object that only claims to be an array
        return None
    return numbers if numbers.dtype.kind in "iuf" and np.isfinite(numbers).all() else None


def known_medians(table: FloatArray, axis: int) -> FloatArray:
    """The medians along an axis of all numbers but nan; nan where there are none.

    >>> known_medians(np.array([[1.0, np.nan], [5.0, np.nan]]), axis=0)
    array([ 3., nan])
    """
    masked: Any = np.ma  # most of which has no types
    return masked.median(masked.masked_invalid(table), axis=axis).filled(np.nan)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Columns of actions; a missing micro-batch is -1.

    >>> [str(action) for action in Rows.of(Kind.F, 2, [0, 1, 2]).actions()]
    ['2F0', '2F1', '2F2']
    """

    kind: IntArray
    stage: IntArray
    microbatch: IntArray
    joined: BoolArray

    @classmethod
    def of(
        cls,
        kind: npt.ArrayLike,
        stage: npt.ArrayLike,
        microbatch: npt.ArrayLike = -1,
        joined: npt.ArrayLike = False,
    ) -> Rows:
        """Columns from arrays and scalars, which are stretched to one length."""
        columns = np.broadcast_arrays(np.atleast_1d(kind), stage, microbatch, joined)
        return cls(
            columns[0].astype(np.int8),
            columns[1].astype(np.int32),
            columns[2].astype(np.int32),
            columns[3].astype(np.bool_),
        )

    @classmethod
    def from_actions(cls, actions: Iterable[Action | Overlap]) -> Rows:
        """Columns from action objects."""
        leaves: list[tuple[int, int, int, bool]] = []
        for action in actions:
            pair = (action.forward, action.backward) if isinstance(action, Overlap) else (action,)
            for leaf in pair:
                microbatch = -1 if leaf.microbatch is None else leaf.microbatch
                leaves.append((leaf.kind, leaf.stage, microbatch, leaf is not pair[-1]))
        return cls.of(*np.array(leaves, np.int64).reshape(-1, 4).T)

    @classmethod
    def concatenate(cls, parts: Sequence[Rows]) -> Rows:
        """One after the other."""
        return cls(
            np.concatenate([part.kind for part in parts]),
            np.concatenate([part.stage for part in parts]),
            np.concatenate([part.microbatch for part in parts]),
            np.concatenate([part.joined for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, index: slice | IntArray | BoolArray) -> Rows:
        """Some of the rows; the caller sees to it that pairs stay whole."""
        return Rows(self.kind[index], self.stage[index], self.microbatch[index], self.joined[index])

    def second_of_pair(self) -> BoolArray:
        """Which rows are the second half of an overlapped pair."""
        second = np.zeros(len(self), np.bool_)
        second[1:] = self.joined[:-1]
        return second

    def before(self, microbatch: int) -> Rows:
        """Without the micro-batches from this one on; the other half of a pair then runs alone."""
        keep = self.microbatch < microbatch
        both = keep & np.append(keep[1:], False)
        return Rows(self.kind, self.stage, self.microbatch, self.joined & both)[keep]

    def leaf(self, row: int) -> Action:
        """The plain action in one row."""
        microbatch = int(self.microbatch[row])
        return Action(
            int(self.stage[row]), Kind(self.kind[row]), None if microbatch < 0 else microbatch
        )

    def actions(self) -> Iterator[Action | Overlap]:
        """The rows as action objects, pairs put together."""
        for row in np.flatnonzero(~self.second_of_pair()).tolist():
            leaf = self.leaf(row)
            yield Overlap(leaf, self.leaf(row + 1)) if self.joined[row] else leaf
