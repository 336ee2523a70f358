"""Validates a plan: reports every broken rule, and proves that it cannot deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, TypeAlias, cast, get_args

import numpy as np

from taktline.checks import check, check_one_of
from taktline.errors import InvalidPlanError, PlanError
from taktline.plan.action import Action, Kind
from taktline.plan.plan import Level, Plan
from taktline.plan.rows import IntArray
from taktline.plan.rules import RULES, Subject, Violation, sizes
from taktline.plan.walk import unit_run, walk

Sends: TypeAlias = Literal["blocking", "asynchronous"]


def validate(plan: Plan, *, sends: Sends = "blocking") -> tuple[Violation, ...]:
    """All violations of the rules; empty if the plan is valid.

    With ``sends="blocking"``, a send counts as done only once its receive is posted, and a plan
    that passes cannot deadlock on any transport. With ``"asynchronous"``, sends return at once and
    messages arrive in order on each channel (sender, receiver, activations or gradients).

    >>> from taktline.plan import Plan
    >>> for violation in validate(Plan.from_actions([["0B0", "0F0"]])):
    ...     print(violation)
    [order] rank 0, position 0, 0B0: needs 0F0, which comes later (rank 0, position 1)
    """
    check("plan", plan, Plan)
    check_one_of("sends", sends, get_args(Sends), error=PlanError)
    # A plan never changes, so neither does the answer. Sound with blocking sends is sound always.
    if plan.known.get("blocking") == ():
        return ()
    if sends not in plan.known:
        plan.known[sends] = tuple(_violations(plan, sends))
    return cast(tuple[Violation, ...], plan.known[sends])


def require_valid(plan: Plan, *, sends: Sends = "asynchronous") -> None:
    """Raise an InvalidPlanError with every violation, if there is one.

    >>> from taktline.plan import Plan
    >>> require_valid(Plan.from_actions([["0F0", "0B0"]]))
    """
    if violations := validate(plan, sends=sends):
        raise InvalidPlanError(plan.name, violations)


def _violations(plan: Plan, sends: Sends) -> Iterator[Violation]:
    if found := list(sizes(plan)):
        yield from found
        return
    subject = Subject(plan)
    broken = [violation for rule in RULES for violation in rule(subject)]
    yield from broken
    if not broken:
        yield from _deadlocks(subject, sends)


def _deadlocks(subject: Subject, sends: Sends) -> Iterator[Violation]:
    """Walk through the plan; of ranks that do not finish, some wait for each other in a circle."""
    plan, rows = subject.plan, subject.plan.rows
    waits = subject.needs.waits
    if sends == "blocking" and plan.level == Level.LOWERED:
        sending = np.isin(rows.kind, (Kind.SEND_F, Kind.SEND_B))
        waits = np.where(sending, subject.partner, waits)
        if _follows_known_order(plan, waits, subject.rank):
            return
        result = walk(plan, waits, np.zeros(len(rows)))
    else:
        result = unit_run(plan, subject.needs)
    if not result.blocked:
        return
    # A rank that is blocked waits for one that is, so from any of them the way leads to a circle.
    path = [next(iter(result.blocked))]
    while (ahead := int(subject.rank[waits[result.blocked[path[-1]]]])) not in path:
        path.append(ahead)
    circle = path[path.index(ahead) :]
    story: list[str] = []
    cycle: list[tuple[int, Action, Action]] = []
    for rank, ahead in zip(circle, [*circle[1:], circle[0]], strict=True):
        row = result.blocked[rank]
        here, there, position = rows.leaf(row), rows.leaf(int(waits[row])), subject.position[row]
        cycle.append((rank, here, there))
        story.append(
            f"rank {rank} waits at {here} (position {position}) for {there} of rank {ahead}"
        )
    found = subject.at(result.blocked[circle[0]], "deadlock", "; ".join(story))
    yield replace(found, cycle=tuple(cycle))


def _follows_known_order(plan: Plan, waits: IntArray, rank: IntArray) -> bool:
    """Whether the order that the plan was made along (if any) proves that it can always go on.

    It does if every row waits only for rows that are strictly earlier in that order.
    """
    key = plan.known.get("order")
    if not isinstance(key, np.ndarray):
        return False
    same_rank = rank[1:] == rank[:-1]
    in_order = (key[1:] >= key[:-1]) | ~same_rank
    return bool(in_order.all() and (key[waits] < key)[waits >= 0].all())
