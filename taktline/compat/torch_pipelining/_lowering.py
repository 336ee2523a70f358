"""Messages between ranks: added to an order of computations, and played through."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from taktline.compat.torch_pipelining._action import (
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
    W,
    _Action,
)
from taktline.compat.torch_pipelining._checks import _format_pipeline_order
from taktline.compat.torch_pipelining._passes import parts
from taktline.errors import InvalidOrderError, PlanError

__all__ = ["_add_send_recv", "_defer_recv_ops", "_simulate_comms_compute"]

StageToRank = Callable[[int], int]


def _sources(action: _Action, num_stages: int) -> tuple[_Action, ...]:
    """What brings its rank the input of a forward or backward, if it does not make it itself."""
    stage, kind, microbatch, _ = action
    if kind == F and stage > 0:
        return _Action(stage, RECV_F, microbatch), _Action(stage - 1, F, microbatch)
    if kind in (B, I) and stage != num_stages - 1:
        after = (_Action(stage + 1, kind, microbatch) for kind in (I, B))
        return _Action(stage, RECV_B, microbatch), *after
    return ()


def _is_ready(action: _Action, done: set[_Action], num_stages: int) -> bool:
    sources = _sources(action, num_stages)
    return not sources or not done.isdisjoint(sources)


def _message(
    action: _Action, stage_to_rank: StageToRank, num_stages: int
) -> tuple[_Action, _Action] | None:
    """The SEND behind an action and its RECV, if the next stage lies on another rank."""
    stage, kind, microbatch, _ = action
    if kind == F and stage != num_stages - 1:
        peer, send, receive = stage + 1, SEND_F, RECV_F
    elif kind in (B, I) and stage != 0:
        peer, send, receive = stage - 1, SEND_B, RECV_B
    else:
        return None
    if stage_to_rank(peer) == stage_to_rank(stage):
        return None
    return _Action(stage, send, microbatch), _Action(peer, receive, microbatch)


def _add_send_recv(
    compute_actions: dict[int, list[_Action]], stage_to_rank: StageToRank, num_stages: int
) -> dict[int, list[_Action]]:
    """Add a SEND behind what leaves a rank, and its RECV on the other side. Empties its input.

    Ranks take turns; a receive is put where the other rank has come to when its message is sent.

    >>> order = {0: [_Action(0, F, 0), _Action(0, B, 0)], 1: [_Action(1, F, 0), _Action(1, B, 0)]}
    >>> _add_send_recv(order, lambda stage: stage, 2)
    {0: [0F0, 0SEND_F0, 0RECV_B0, 0B0], 1: [1RECV_F0, 1F0, 1B0, 1SEND_B0]}
    """
    lowered: dict[int, list[_Action]] = {rank: [] for rank in compute_actions}
    done: dict[int, set[_Action]] = {rank: set() for rank in compute_actions}

    def add(rank: int, action: _Action) -> None:
        lowered[rank].append(action)
        done[rank].add(action)

    while compute_actions:
        before = sum(map(len, compute_actions.values()))
        for rank in sorted(compute_actions):
            waiting = compute_actions[rank]
            action = waiting[0] if waiting else None
            now = () if action is None else parts(action)
            if not all(_is_ready(part, done[rank], num_stages) for part in now):
                continue
            if action is not None:
                add(rank, action)
                done[rank].update(now)
            for part in now:
                message = _message(part, stage_to_rank, num_stages)
                if message is not None:
                    add(rank, message[0])
                    add(stage_to_rank(message[1].stage_index), message[1])
            del waiting[:1]
            if not waiting:
                del compute_actions[rank]
        if compute_actions and before == sum(map(len, compute_actions.values())):
            raise InvalidOrderError(
                "Malformed compute schedule, can't schedule sends/recvs: no rank can go on with "
                + ", ".join(f"{a[0]} (rank {r})" for r, a in sorted(compute_actions.items()))
            )
    return lowered


class _Play:
    """An order that is played in steps, one action for each rank that can go on."""

    def __init__(
        self, order: dict[int, list[_Action | None]], stage_to_rank: StageToRank, num_stages: int
    ) -> None:
        self.waiting = {
            rank: [action for action in order[rank] if action is not None] for rank in sorted(order)
        }
        self.steps: dict[int, list[_Action | None]] = {rank: [] for rank in self.waiting}
        self._done: dict[int, set[_Action]] = {rank: set() for rank in self.waiting}
        self._stage_to_rank = stage_to_rank
        self._num_stages = num_stages

    def can(self, action: _Action) -> bool:
        """Whether all that an action needs has been played."""
        return all(map(self._can, parts(action)))

    def _can(self, action: _Action) -> bool:
        stage, kind, microbatch, _ = action
        done = self._done[self._stage_to_rank(stage)]
        if kind in (F, B, I):
            return _is_ready(action, done, self._num_stages)
        if kind == W:
            return True
        if kind == SEND_F:
            return _Action(stage, F, microbatch) in done
        if kind == SEND_B:
            return not done.isdisjoint(_Action(stage, kind, microbatch) for kind in (I, B))
        if kind in (RECV_F, RECV_B):
            peer, sent = (stage - 1, SEND_F) if kind == RECV_F else (stage + 1, SEND_B)
            return _Action(peer, sent, microbatch) in self._done[self._stage_to_rank(peer)]
        raise PlanError(f"Unsupported action type {action}")

    def ready(self) -> Iterator[tuple[int, _Action | None]]:
        """Each rank that is not at its end, with its next action, or None if it must wait."""
        for rank in [rank for rank, actions in self.waiting.items() if actions]:
            action = self.waiting[rank][0]
            yield rank, action if self.can(action) else None

    def play(self, rank: int, action: _Action) -> None:
        """Note an action that its rank has just done."""
        self._done[rank].update(parts(action))
        del self.waiting[rank][0]


def _simulate_comms_compute(
    pipeline_order: dict[int, list[_Action | None]], stage_to_rank: StageToRank, num_stages: int
) -> dict[int, list[_Action | None]]:
    """The same order with a None for each step in which a rank waits.

    >>> order = {0: [_Action(0, F, 0), _Action(0, SEND_F, 0)], 1: [_Action(1, RECV_F, 0)]}
    >>> _simulate_comms_compute(order, lambda stage: stage, 2)
    {0: [0F0, 0SEND_F0], 1: [None, 1RECV_F0]}
    """
    play = _Play(pipeline_order, stage_to_rank, num_stages)
    while any(play.waiting.values()):
        moved = False
        for rank, action in play.ready():
            play.steps[rank].append(action)
            if action is not None:
                play.play(rank, action)
                moved = True
        # A rank that has waited for a later one goes on in the same step.
        for rank, action in play.ready():
            if action is not None and play.steps[rank][-1] is None:
                play.steps[rank][-1] = action
                play.play(rank, action)
        if not moved:
            stuck = "".join(
                f"\nrank {rank} waits at {actions[0]}"
                for rank, actions in play.waiting.items()
                if actions
            )
            table = _format_pipeline_order(play.steps)
            raise PlanError(f"Schedule is not progressing{stuck}\n{table}")
    return play.steps


def _defer_recv_ops(
    actions: dict[int, list[_Action]], stage_to_rank: StageToRank
) -> dict[int, list[_Action]]:
    """Put off each RECV until just before what needs it.

    Of two ranks that send to each other, the lower one does not put off a receive behind a send to
    the other: with sends that block, both would wait for ever.

    >>> order = [_Action(1, RECV_F, 0), _Action(1, RECV_F, 1), _Action(1, F, 0), _Action(1, F, 1)]
    >>> _defer_recv_ops({1: order}, lambda stage: stage)
    {1: [1RECV_F0, 1F0, 1RECV_F1, 1F1]}
    """
    return {rank: _deferred(rank, order, stage_to_rank) for rank, order in actions.items()}


def _deferred(rank: int, order: list[_Action], stage_to_rank: StageToRank) -> list[_Action]:
    result: list[_Action] = []
    waiting: dict[_Action, None] = {}
    for action in order:
        kind = action.computation_type
        if kind in (RECV_F, RECV_B):
            waiting[action] = None
            continue
        due: list[_Action] = []
        if kind in (SEND_F, SEND_B):
            peer = stage_to_rank(action.stage_index + (1 if kind == SEND_F else -1))
            if rank < peer:
                due = [receive for receive in waiting if stage_to_rank(_sender(receive)) == peer]
        else:
            for part in parts(action):
                receive = _receive_of(part)
                if receive is not None and receive in waiting and receive not in due:
                    due.append(receive)
        for receive in due:
            del waiting[receive]
        result += [*due, action]
    if waiting:
        raise InvalidOrderError(
            f"Malformed input schedule on rank {rank}: leftover RECV ops with no consumer found: "
            f"{list(waiting)}. Every RECV must be consumed by a downstream compute op."
        )
    return result


def _receive_of(action: _Action) -> _Action | None:
    """The receive whose message an action needs, should there be one."""
    stage, kind, microbatch, _ = action
    if kind == F:
        return _Action(stage, RECV_F, microbatch)
    return _Action(stage, RECV_B, microbatch) if kind in (B, I) else None


def _sender(receive: _Action) -> int:
    """The stage that a message comes from."""
    return receive.stage_index + (-1 if receive.computation_type == RECV_F else 1)
