"""The actions of a rank, and how they are written.

::

    3F7                     stage 3, forward of micro-batch 7
    3B7                     its full backward, or in two halves:
    3I7  3W7                  the gradient of the input, then that of the weights
    3RECOMPUTE7             the forward again, for the backward: 3F7 then keeps its input only
    3OFFLOAD7  3RELOAD7     start to copy what 3F7 kept to the host, and back to the device
    3SEND_F7  4RECV_F7      the activation from stage 3 to stage 4
    4SEND_B7  3RECV_B7      its gradient, from stage 4 back to stage 3
    3UNSHARD  3RESHARD      gather and release the weights of a stage, from other ranks or the host
    3REDUCE_GRAD            add up a stage's gradients over the data-parallel ranks
    (0F1;3B0)OVERLAP_F_B    a forward and a backward run as one

:func:`parse` and ``str`` are inverse: every action has exactly one text.

Copies run beside the computation, on one engine for each rank and direction, which takes them in
the order of the rank's list. They are waited for at known places, so that memory follows from the
order of the actions and not from times:

- A rank that starts a copy, in either direction, first waits until its OFFLOADs before have ended.
  What they copied leaves the device there. So one OFFLOAD of a rank is under way at a time.
- A RELOAD takes the memory of what it brings back when it starts.
- The B or I of a RELOAD waits for its end; after this backward the host's memory is free.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from taktline.checks import check
from taktline.errors import ActionSyntaxError, PlanError

LARGEST = 2**31 - 1
"""Stages and micro-batches are numbered up to here."""


class Kind(IntEnum):
    """The kind of an action; plans are written with the name, and stored with the number.

    >>> Kind.F.is_compute, Kind.SEND_F.is_communication, Kind.UNSHARD.has_microbatch
    (True, True, False)
    """

    F = 0  # forward
    RECOMPUTE = 1  # forward again, for what the backward needs
    B = 2  # full backward: I and W in one
    I = 3  # noqa: E741  backward for the inputs
    W = 4  # backward for the weights
    OFFLOAD = 5  # start to copy what the forward kept to the host
    RELOAD = 6  # start to copy it back
    SEND_F = 7  # hand an activation to the next stage
    RECV_F = 8  # post the receive of an activation
    SEND_B = 9  # hand a gradient to the previous stage
    RECV_B = 10  # post the receive of a gradient
    UNSHARD = 11  # gather a sharded stage's parameters
    RESHARD = 12  # release them
    REDUCE_GRAD = 13  # reduce a stage's gradients over the data-parallel ranks

    @property
    def is_compute(self) -> bool:
        """Whether this runs the stage's module."""
        return self <= Kind.W

    @property
    def is_communication(self) -> bool:
        """Whether this sends to or receives from a neighbouring stage."""
        return Kind.SEND_F <= self <= Kind.RECV_B

    @property
    def has_microbatch(self) -> bool:
        """Whether this belongs to one micro-batch, not to the stage as a whole."""
        return self <= Kind.RECV_B


COPIES = (Kind.OFFLOAD, Kind.RELOAD)


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank, for a stage and (mostly) a micro-batch.

    >>> Action(3, Kind.F, 7)
    Action(3F7)
    """

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __post_init__(self) -> None:
        check("kind", self.kind, Kind, error=PlanError)
        if self.kind.has_microbatch != (self.microbatch is not None):
            needs = "needs a" if self.kind.has_microbatch else "takes no"
            raise PlanError(f"{self.kind.name} {needs} micro-batch")
        for name in ("stage", "microbatch") if self.kind.has_microbatch else ("stage",):
            number = getattr(self, name)
            # The full check is slow, and plans may have millions of actions.
            if type(number) is not int or not 0 <= number <= LARGEST:
                number = check(name, number, int, least=0, most=LARGEST, error=PlanError)
                object.__setattr__(self, name, number)

    def __str__(self) -> str:
        number = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind.name}{number}"

    def __repr__(self) -> str:
        return f"Action({self})"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward that run as one, so that each hides the other's communication.

    >>> Overlap(Action(0, Kind.F, 1), Action(3, Kind.B, 0))
    Overlap((0F1;3B0)OVERLAP_F_B)
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        check("forward", self.forward, Action, error=PlanError)
        check("backward", self.backward, Action, error=PlanError)
        if self.forward.kind is not Kind.F or self.backward.kind not in (Kind.B, Kind.I):
            raise PlanError(f"an overlap joins an F and a B or I, in this order: {self}")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    def __repr__(self) -> str:
        return f"Overlap({self})"


# No leading zeros and no digits of other scripts: one text for each action.
_NUMBER = r"0|[1-9][0-9]{0,17}"
_KIND = "|".join(sorted(Kind.__members__, key=len, reverse=True))
_ACTION = re.compile(rf"({_NUMBER})?({_KIND})?({_NUMBER})?")
_OVERLAP = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


def parse(text: str) -> Action | Overlap:
    """The action that a text describes.

    >>> parse("3F7").stage
    3
    >>> parse("(0F1;3B0)OVERLAP_F_B").backward
    Action(3B0)
    >>> parse("0BANANA3")
    Traceback (most recent call last):
    taktline.errors.ActionSyntaxError: not an action: expected a micro-batch number at character 3
      0BANANA3
        ^
    """
    if pair := _OVERLAP.fullmatch(check("text", text, str)):
        return Overlap(_read(text, *pair.span(1)), _read(text, *pair.span(2)))
    if text.startswith("("):
        raise ActionSyntaxError(text, 0, "a pair such as (0F1;3B0)OVERLAP_F_B")
    return _read(text, 0, len(text))


def _read(text: str, begin: int, end: int) -> Action:
    """The plain action between two characters."""
    match = _ACTION.match(text, begin, end)
    assert match is not None  # all its parts are optional
    stage, name, number = match.groups()
    kind = Kind[name] if name else None
    if stage is None:
        raise ActionSyntaxError(text, begin, "a stage number")
    if kind is None:
        raise ActionSyntaxError(text, match.end(1), f"one of {', '.join(Kind.__members__)}")
    if kind.has_microbatch and number is None:
        raise ActionSyntaxError(text, match.end(2), "a micro-batch number")
    action = Action(int(stage), kind, int(number) if kind.has_microbatch else None)
    last = match.end(3 if kind.has_microbatch else 2)
    if last != end:
        raise ActionSyntaxError(text, last, "the end")
    return action
