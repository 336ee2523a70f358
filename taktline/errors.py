"""Every exception that Taktline raises for a reader to act on.

::

    TaktlineError
    ├── ActionSyntaxError    a text is not an action; knows the character where it goes wrong
    ├── PlanFileError        a plan file cannot be read; knows path, row and column
    ├── ScheduleError        a schedule's name is unknown, or its numbers do not fit it
    ├── CostError            costs that make no sense, or not for this plan
    └── PlanError            a plan cannot be what it claims to be
        └── InvalidPlanError     a plan broke its rules; carries every violation

All of them are also a :class:`ValueError`, so code that does not know Taktline can catch them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

__all__ = [
    "ActionSyntaxError",
    "CostError",
    "InvalidPlanError",
    "PlanError",
    "PlanFileError",
    "ScheduleError",
    "TaktlineError",
]


class TaktlineError(ValueError):
    """The root of the tree: catch this to catch whatever Taktline says about your input.

    >>> from taktline.plan import build
    >>> try:
    ...     build("1f1b", ranks=0, microbatches=8)
    ... except TaktlineError as error:
    ...     print(error)
    1f1b: ranks must be a whole number from 1 up, not 0
    """


class ActionSyntaxError(TaktlineError):
    """A text is not an action; ``position`` is the character where reading stopped.

    >>> raise ActionSyntaxError("1F-3", 2, "a micro-batch number")
    Traceback (most recent call last):
    taktline.errors.ActionSyntaxError: not an action: expected a micro-batch number at character 3
      1F-3
        ^
    """

    def __init__(self, text: str, position: int, expected: str) -> None:
        self.text = text
        self.position = position
        self.expected = expected
        # Long texts are cut around the mistake, so that the caret stays in sight.
        left = max(0, position - 40)
        excerpt = text[left : position + 40].replace("\n", " ").replace("\t", " ")
        super().__init__(
            f"not an action: expected {expected} at character {position + 1}\n"
            f"  {excerpt}\n  {' ' * (position - left)}^"
        )


class PlanFileError(TaktlineError):
    """A plan file cannot be read; ``row`` and ``column`` count from 1, as editors do.

    >>> raise PlanFileError("plan.csv", "an action is a text", row=2, column=7)
    Traceback (most recent call last):
    taktline.errors.PlanFileError: plan.csv, row 2, column 7: an action is a text
    """

    def __init__(
        self, path: str | Path, reason: str, *, row: int | None = None, column: int | None = None
    ) -> None:
        self.path = Path(path)
        self.reason = reason
        self.row = row
        self.column = column
        where = "".join(
            f", {name} {number}"
            for name, number in (("row", row), ("column", column))
            if number is not None
        )
        super().__init__(f"{path}{where}: {reason}")


class ScheduleError(TaktlineError):
    """A schedule's name is unknown, or its numbers do not fit it; the text says what would.

    >>> from taktline.plan import build
    >>> build("zbv", ranks=4, microbatches=8, stages_per_rank=3)
    Traceback (most recent call last):
    taktline.errors.ScheduleError: zbv runs 2 stages per rank, not 3; with 3 there are: ...
    """


class CostError(TaktlineError):
    """Costs that make no sense, or that do not fit the plan they are used with.

    >>> from taktline.plan import Costs
    >>> Costs(forward=-1.0)
    Traceback (most recent call last):
    taktline.errors.CostError: forward must be a number from 0 up, or one for each stage, not -1.0
    """


class PlanError(TaktlineError):
    """A plan cannot be what it claims to be.

    >>> from taktline.plan import Plan
    >>> Plan.from_actions([["1F0"]])
    Traceback (most recent call last):
    taktline.errors.PlanError: no rank computes stage 0, so where it lies is unknown; ...
    """


class _Violation(Protocol):
    """What :class:`InvalidPlanError` needs to know of a violation (see ``plan.validate``)."""

    def __str__(self) -> str: ...


class InvalidPlanError(PlanError):
    """A plan broke its rules; ``violations`` holds all of them, the text the first few.

    >>> from taktline.plan import Plan, require_valid
    >>> require_valid(Plan.from_actions([["0B0", "0F0"]]))
    Traceback (most recent call last):
    taktline.errors.InvalidPlanError: plan 'custom' is not valid: 1 violation
      [order] rank 0, position 0, 0B0: needs 0F0, which comes later (rank 0, position 1)
    """

    SHOWN = 10

    def __init__(self, plan_name: str, violations: Sequence[_Violation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        lines = [f"plan {plan_name!r} is not valid: {count} violation{'s' * (count != 1)}"]
        lines += [f"  {violation}" for violation in self.violations[: self.SHOWN]]
        if count > self.SHOWN:
            lines.append(f"  and {count - self.SHOWN} more (see .violations)")
        super().__init__("\n".join(lines))
