"""Who goes on after a loss: the processes that are left agree on it, over the control plane.

Each tells all others with whom it would go on, and in which round. A process that learns of another
loss, or of another one that leaves somebody out, votes again. They agree once all that would go on
have voted for the same. If that world does not come about, the next round begins.

::

    rank 0   votes {0, 1, 3}                agrees
    rank 1   votes {0, 1, 3}                agrees
    rank 2   has ended
    rank 3   votes {0, 1, 2, 3}  {0, 1, 3}  agrees

Two parts of a cut network must not both go on. So a part needs the majority of all processes that
are not known to have ended; of two halves, the one with the first of them goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from taktline.errors import LostRankError
from taktline.transport.control_plane import Plane
from taktline.transport.news import Vote
from taktline.transport.sockets import NOWHERE, Address

_PROOF_SECONDS = 2.0
"""How long to wait for the proof that a process has ended which is taken to be lost."""
_LATE_SECONDS = 3.0
"""How much longer to wait each time when processes have been given up."""
_PAUSE = 0.1


class LeftBehindError(LostRankError):
    """This process must not go on: others do without it, or it cannot know whether they do."""


def elect(
    plane: Plane, suspects: Collection[int], offer: Callable[[], Address], seconds: float
) -> list[Vote]:
    """Agree on who goes on; returns the votes of these, which are equal, in their order.

    Args:
        plane: the control plane; all of ``plane.numbers`` were there until now.
        suspects: those that are lost for another reason than that their process has ended.
        offer: makes a store for the new world, if this process is the first, and returns where.
        seconds: how long to wait for a process that does not vote.
    """
    me, deadline = plane.process, time.monotonic() + seconds
    mine, left_out = Vote(me, 0, 0, [], [], NOWHERE), set(suspects) - {me}
    _end(plane, left_out)
    while True:
        votes = _current(plane)
        left_out |= _left_out(plane, votes, left_out)
        gone = left_out | plane.news.gone.keys()
        left = [process for process in plane.numbers if process not in gone or process == me]
        wanted = mine._replace(
            round=max([plane.generation + 1, *(vote.round for vote in votes)]),
            members=left,
            dead=sorted(plane.news.dead()),
            store=offer() if left[0] == me else NOWHERE,
        )
        if wanted != mine:
            known = plane.news.votes.get(me)
            mine = wanted._replace(number=1 + (known.number if known else 0))
            plane.vote(mine)
        found = {vote.process: vote for vote in _current(plane) if vote.round == mine.round}
        if all(p in found and list(found[p].members) == left for p in left):
            agreed = [found[process] for process in left]
            _require_majority(plane, agreed)
            return agreed
        if time.monotonic() > deadline:
            late = {process for process in left if process not in found}
            left_out |= late
            _end(plane, late)
            deadline = time.monotonic() + _LATE_SECONDS
        plane.await_news(_PAUSE)


def _current(plane: Plane) -> list[Vote]:
    """The votes on the world after that of now."""
    votes = (plane.news.votes.get(process) for process in plane.numbers)
    return [vote for vote in votes if vote is not None and vote.round > plane.generation]


def _left_out(plane: Plane, votes: Sequence[Vote], known: set[int]) -> set[int]:
    """The processes that others leave out; raises if that is this one."""
    found = set[int]()
    for vote in votes:
        if vote.process in known:
            continue
        missing = set(plane.numbers) - set(vote.members)
        if plane.process not in missing:
            found |= missing
        elif _has_majority(plane.numbers, vote.members, vote.dead):
            raise LeftBehindError(
                f"rank {plane.process} was left behind: it did not answer in time, or could not be "
                f"reached, so rank {vote.process} and others go on without it; start it again",
                peer=vote.process,
            )
    return found


def _end(plane: Plane, processes: Collection[int]) -> None:
    """End processes that are given up, where that can be done, and wait for the proof."""
    deadline = time.monotonic() + (_PROOF_SECONDS if processes else 0.0)
    for process in processes:
        plane.end(process)
    while not plane.news.gone.keys() >= set(processes) and time.monotonic() < deadline:
        plane.await_news(_PAUSE)


def _has_majority(members: Sequence[int], left: Collection[int], dead: Collection[int]) -> bool:
    """Whether these may go on without the others.

    >>> _has_majority([0, 1, 2, 3], [2, 3], dead=[1]), _has_majority([0, 1, 2, 3], [2, 3], dead=[])
    (True, False)
    """
    others = [process for process in members if process not in dead]
    return 2 * len(left) > len(others) or (2 * len(left) == len(others) and others[0] in left)


def _require_majority(plane: Plane, agreed: Sequence[Vote]) -> None:
    left = [vote.process for vote in agreed]
    dead = {process for vote in agreed for process in vote.dead}
    if not _has_majority(plane.numbers, left, dead - set(left)):
        others = [process for process in plane.numbers if process not in left]
        raise LeftBehindError(
            f"of the ranks {plane.numbers}, only {left} can reach each other, and {others} may "
            "live: without a majority they must not go on, so they end. If the others have ended, "
            "too, restart all ranks from a checkpoint",
            peer=others[0],
        )
