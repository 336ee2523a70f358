"""Actions as torch writes them: named tuples, with kinds that are texts.

They say the same as :class:`taktline.plan.Action`, more loosely: a micro-batch may be missing or
may be given where it means nothing, and an overlap may join any actions. What reads and makes them
here keeps to that.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from taktline.errors import InvalidActionError

__all__ = [
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "FULL_BACKWARD",
    "OVERLAP_F_B",
    "RECV_B",
    "RECV_F",
    "REDUCE_GRAD",
    "RESHARD",
    "SEND_B",
    "SEND_F",
    "UNSHARD",
    "B",
    "F",
    "I",
    "W",
    "_Action",
    "_ComputationType",
    "_action_regex",
]


class _ComputationType(str, Enum):  # noqa: UP042  (whose str() would be the value)
    """What an action does; the value is how it is written.

    >>> _ComputationType.from_str("B")
    <_ComputationType.FULL_BACKWARD: 'B'>
    """

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> _ComputationType:
        """The kind that is written so."""
        try:
            return _ComputationType(action)
        except ValueError:
            raise InvalidActionError(f"Invalid computation type {action}") from None


FORWARD = F = _ComputationType.FORWARD
BACKWARD_INPUT = I = _ComputationType.BACKWARD_INPUT  # noqa: E741
BACKWARD_WEIGHT = W = _ComputationType.BACKWARD_WEIGHT
FULL_BACKWARD = B = _ComputationType.FULL_BACKWARD
UNSHARD = _ComputationType.UNSHARD
RESHARD = _ComputationType.RESHARD
SEND_F = _ComputationType.SEND_F
RECV_F = _ComputationType.RECV_F
SEND_B = _ComputationType.SEND_B
RECV_B = _ComputationType.RECV_B
OVERLAP_F_B = _ComputationType.OVERLAP_F_B
REDUCE_GRAD = _ComputationType.REDUCE_GRAD

_COMPUTES = {F, B, I, W, OVERLAP_F_B}

# All kinds but the overlap, which is written around others. No kind is the beginning of another
# that comes after it, but for the letters.
_action_regex = re.compile(
    r"(\d+)(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)"
)


class _Action(NamedTuple):
    """One thing that a rank does for a stage and a micro-batch, or several things at once.

    >>> _Action(2, F, 0), _Action(1, UNSHARD)
    (2F0, 1UNSHARD)
    >>> _Action(-1, OVERLAP_F_B, None, (_Action(0, F, 1), _Action(3, B, 0)))
    (0F1;3B0)OVERLAP_F_B
    """

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[_Action, ...] | None = None

    def __str__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(str, self.sub_actions))}){self.computation_type.value}"
        number = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{number}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def is_compute_op(self) -> bool:
        """Whether this runs the stage's module."""
        return self.computation_type in _COMPUTES

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        """Read one action; None for an empty text. What follows an action is not looked at.

        >>> _Action.from_str(" 2F0 "), _Action.from_str("")
        (2F0, None)
        >>> _Action.from_str("(0F1;3B0)OVERLAP_F_B").sub_actions
        (0F1, 3B0)
        """
        text = action_string.strip()
        if not text:
            return None
        if text.startswith("(") and ")" in text:
            inner, _, kind = text[1:].partition(")")
            parts = [_Action.from_str(part) for part in inner.split(";")]
            found = tuple(part for part in parts if part is not None)
            return _Action(-1, _ComputationType.from_str(kind), None, found or None)
        if match := _action_regex.match(text):
            stage, kind, number = match.groups()
            microbatch = int(number) if number else None
            return _Action(int(stage), _ComputationType.from_str(kind), microbatch)
        raise InvalidActionError(
            f"Invalid action string: {text}, should be formatted as "
            "[stage][action type][(microbatch)] e.g. 2F0"
        )
