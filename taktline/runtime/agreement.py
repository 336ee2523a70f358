"""What a rank says of each call of step() and eval(), and what does not fit together, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from taktline.errors import MismatchError
from taktline.text import by_rank, counted

__all__ = ["Call", "differs", "mismatch", "out_of_step"]


class Call(NamedTuple):
    """What a rank says of one call of step() or eval(), as numbers."""

    failed: int
    """1 if it could not even begin."""
    schedule: int
    """The number that the ranks have agreed on for it; 0 before its first step."""
    waiting: int
    """How many schedules of these ranks wait for their first step."""
    place: int
    """Which of them this is, in the order in which they were made."""
    call: int
    """Which call of this schedule's step() and eval() it is."""
    step: int
    """How many training steps there were before."""
    plan: int
    batch: int
    """The size of the batch along its micro-batches, 0 if this rank got none."""
    target: int
    """The same for the target, unless it is cut by itself."""
    shares: int
    """Whether every rank shall have the losses."""
    traces: int
    """Whether it notes what runs when."""
    inputs: int
    """A digest of the shapes and types of what it got."""
    looked_at: int = 0
    """In which call it has looked at its data; 0 if it has not."""
    arguments: int = 0
    """The fingerprint of the data in its arguments; 0 if it got none."""
    targets: int = 0
    """The same of its target."""

    @classmethod
    def read(cls, numbers: Sequence[int], rank: int) -> Call:
        """From the wire."""
        if len(numbers) != len(cls._fields):
            raise MismatchError(
                f"rank {rank} runs another version of Taktline; install the same on every rank"
            )
        return cls(*numbers)


def mismatch(calls: Sequence[Call]) -> str | None:
    """Why these calls cannot be one step; None if they can."""
    if len(calls) > 1 and (story := _disagreement(calls)):
        return story
    batch = max(call.batch for call in calls)
    for rank, call in enumerate(calls):
        # Not always equal: a target may have one entry a token.
        if batch and call.target % batch:
            return (
                f"the batch has {counted(batch, 'row')}, but the target on rank {rank} has "
                f"{call.target}; give arguments and target of one batch, with as many entries for "
                "each row, or say with target_chunk_spec=… how the target is cut by itself"
            )
    return None if len(calls) == 1 else _different_data(calls)


def _disagreement(calls: Sequence[Call]) -> str | None:
    """What the ranks do not say the same of."""
    if story := differs("value of share_losses", [bool(call.shares) for call in calls]):
        return f"{story}; give every rank the same"
    if story := differs("use of trace()", [bool(call.traces) for call in calls]):
        return f"{story}; enter and leave it on every rank at the same place"
    if len({call.plan for call in calls}) > 1:
        groups = by_rank([f"{call.plan:015x}"[:8] for call in calls])
        return f"the ranks run different plans: {groups}; step the same schedule on every rank"
    batches = {rank: call.batch for rank, call in enumerate(calls) if call.batch}
    if len(set(batches.values())) > 1:
        told = ", ".join(f"{size} on rank {rank}" for rank, size in batches.items())
        return f"the batch has different sizes: {told}; give every rank its part of one batch"
    return None


def out_of_step(calls: Sequence[Call]) -> str | None:
    """Why the ranks are not in the same call of the same schedule; None if they are."""
    if len(calls) == 1:
        return None
    if len({call.schedule for call in calls}) > 1:
        names = [f"number {call.schedule}" if call.schedule else "a new one" for call in calls]
        return (
            f"the ranks step different schedules: {by_rank(names)}, counted by their first steps; "
            "step the same schedules in the same order on every rank"
        )
    if len({call.waiting for call in calls}) == 1 and len({call.place for call in calls}) > 1:
        names = [f"number {call.place + 1} of {call.waiting}" for call in calls]
        return (
            f"the ranks begin with different schedules: {by_rank(names)} that were made and not "
            "stepped yet; make and step the schedules in the same order on every rank"
        )
    if len({call.call for call in calls}) > 1:
        numbers = by_rank([f"number {call.call}" for call in calls])
        return (
            f"the ranks are in different calls of step() and eval(): {numbers}; a rank has left "
            "one out, or made one more. Make the same calls on every rank"
        )
    if story := differs("number of training steps so far", [call.step for call in calls]):
        return f"{story}; set steps on every rank when you resume"
    return None


def _different_data(calls: Sequence[Call]) -> str | None:
    """Which ranks were given other data than the rest of them."""
    latest = max(call.looked_at for call in calls)
    now = calls[0].call
    for what in ("arguments", "targets"):
        found = {
            rank: getattr(call, what)
            for rank, call in enumerate(calls)
            if call.looked_at == latest and getattr(call, what)
        }
        if len(set(found.values())) > 1:
            ((most, _),) = Counter(found.values()).most_common(1)  # the first of several
            one = next(rank for rank, data in found.items() if data == most)
            other = next(rank for rank, data in found.items() if data != most)
            when = "" if latest == now else f" in call {latest} (this is call {now})"
            return (
                f"the ranks were given different {what}{when}: those of rank {other} are not those "
                f"of rank {one}, so inputs would meet the targets of other samples. Give "
                "every rank of a pipeline the same batch: draw it from a generator of its own, "
                "or read it on one rank and hand it on with pipe.loader(…)"
            )
    return None


def differs(noun: str, values: Sequence[object]) -> str | None:
    """What ranks say differently, in words; None if they say the same."""
    if len(set(values)) == 1:
        return None
    return f"the ranks disagree on the {noun}: {by_rank(values)}"
