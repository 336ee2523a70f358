"""Tied weights on several ranks: equal values at first, gradients added up in each step.

::

    rank 0 (embedding)   .grad ──┐            ┌──▶ .grad
                                 ├─▶ sum on ──┤
    rank 3 (head)        .grad ──┘   rank 0   └──▶ .grad
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from taktline.errors import LostRankError, MismatchError
from taktline.meta import TensorMeta
from taktline.runtime.program import Failure, stage_error
from taktline.sharding import Sharding, is_sharded, local
from taktline.stage import PipelineStage, Tie
from taktline.stage.names import named_parameters
from taktline.transport import Channel, Transport
from taktline.transport.one_rank import Alone

T = TypeVar("T")

_PROCESS = secrets.token_hex(8)
_HEADER = 16
"""Bytes in front of the data, nonzero if there is data; 16 for alignment."""


@dataclass(frozen=True, slots=True)
class TieUse:
    """A tied weight in one stage."""

    tie: Tie
    stage: int
    kind: str
    """Shape, type and shards, as text."""
    identity: str
    """The parameter object: local ranks may share one."""

    @classmethod
    def of(cls, tie: Tie, stage: PipelineStage) -> TieUse:
        """The use of a weight in a stage; raises if the stage does not have it."""
        name = tie.name_in(stage.stage_index)
        parameter = named_parameters(stage.submod).get(name or "")
        if parameter is None:
            raise MismatchError(
                f"stage {stage.stage_index} has no parameter {name}, which its ties name: {tie}"
            )
        shards = f" {Sharding.of(parameter).placements}" if is_sharded(parameter) else ""
        return cls(
            tie,
            stage.stage_index,
            f"{TensorMeta(tuple(parameter.shape), parameter.dtype)}{shards}",
            # With the process number: a forked process has the same token and ids.
            f"{_PROCESS}-{os.getpid()}-{id(parameter)}",
        )

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> TieUse:
        """From what ``asdict`` returns."""
        return cls(**{**plain, "tie": Tie(dict(plain["tie"]["uses"]))})


def untied(uses: Sequence[TieUse]) -> str | None:
    """Why the uses of all ranks do not fit together; None if they do."""
    found = {(use.tie, use.stage): use.kind for use in uses}
    for tie in dict.fromkeys(use.tie for use in uses):
        for stage in tie.stages:
            if (tie, stage) not in found:
                return (
                    f"{tie}: these are tied, but not in the ties= of stage {stage}; pass the same "
                    "ties= to each of the stages"
                )
        kinds = {stage: found[tie, stage] for stage in tie.stages}
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{kind} in stage {stage}" for stage, kind in kinds.items())
            return f"{tie}: these are tied, but differ: {listed}; tie equal weights"
    return None


@dataclass(frozen=True, slots=True)
class _TieHolders:
    """The copies of a tied weight."""

    tie: Tie
    stages_of: dict[int, list[int]]
    """By rank, a stage for each copy; the first rank adds up the gradients."""

    @property
    def owner(self) -> int:
        """The rank that adds up the gradients."""
        return next(iter(self.stages_of))

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return list(self.stages_of)[1:]


def _holders_of(ranks: Sequence[Sequence[TieUse]]) -> list[_TieHolders]:
    """The weights with several copies, from the uses of each rank.

    A parameter that several stages or local ranks share is one copy.
    """
    found: dict[Tie, dict[int, list[int]]] = {}
    seen: set[tuple[Tie, str]] = set()
    pairs = [(use, rank) for rank, uses in enumerate(ranks) for use in uses]
    for use, rank in sorted(pairs, key=lambda pair: pair[0].stage):
        if (use.tie, use.identity) not in seen:
            seen.add((use.tie, use.identity))
            found.setdefault(use.tie, {}).setdefault(rank, []).append(use.stage)
    return [
        _TieHolders(tie, stages_of)
        for tie, stages_of in found.items()
        if sum(map(len, stages_of.values())) > 1
    ]


class Ties:
    """The tied weights of this rank, and the other ranks that hold them."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self.uses: list[TieUse] = []
        """The tied weights in this rank's stages."""
        self._holders: list[_TieHolders] = []
        self._transport: Transport = Alone()
        self._rank_of: Sequence[int] = ()
        self._before: dict[nn.Parameter, torch.Tensor | None] | None = None
        self._failure: Failure | None = None
        self.accumulating = False
        """Whether gradients of several steps are added up later."""

    @property
    def there(self) -> bool:
        """Whether any rank is known to hold a tied weight."""
        return bool(self._holders)

    @property
    def fresh(self) -> list[nn.Parameter]:
        """The parameters whose gradients begin anew in the running step; earlier ones are kept."""
        return list(self._before or ())

    def check(self) -> None:
        """Find the tied weights in this rank's stages; raise if one is missing."""
        self.uses = [
            TieUse.of(tie, stage)
            for stage in self._stages.values()
            for tie in stage.ties
            if stage.stage_index in tie.stages
        ]

    def find_holders(self, ranks: Sequence[Sequence[TieUse]]) -> set[Channel]:
        """Find the holders from the uses of each rank; returns the channels between all of them."""
        self._holders = _holders_of(ranks)
        pairs = {(held.owner, other) for held in self._holders for other in held.others}
        return {Channel(*ends, True) for a, b in pairs for ends in ((a, b), (b, a))}

    def begin(self, transport: Transport, rank_of: Sequence[int]) -> None:
        """Give every copy of a weight the values of the first one; ``rank_of`` is by stage."""
        self._transport, self._rank_of = transport, rank_of
        with torch.no_grad():
            for held, parameters in self._mine():
                values = like = local(parameters[0].detach())
                if transport.rank == held.owner:
                    for other in held.others:
                        self._send(other, _packed(like, values))
                else:
                    values = self._receive(held.owner, like)
                if values is not None:
                    first = transport.rank == held.owner  # not written: a save may be reading it
                    for parameter in parameters[first:]:
                        local(parameter.detach()).copy_(values)

    @contextmanager
    def step(self, *, trains: bool) -> Iterator[None]:
        """A step with gradients of its own, which are added to earlier ones at its end."""
        if trains and self._before is None:
            self._before = {p: p.grad for _, parameters in self._mine() for p in parameters}
            for parameter in self._before:
                parameter.grad = None
        try:
            yield
        except BaseException:
            self._join()
            raise
        if not self.accumulating:
            self._join()

    def add_up(self, failure: Failure | None) -> Failure | None:
        """Put the sum of all gradients of a weight into each of its copies; returns any failure.

        After a failure this rank adds nothing, but takes part in every message, so that no rank
        waits for it.
        """
        if self.accumulating or not self._before:
            return failure
        self._failure = failure
        with torch.no_grad():
            for held, parameters in self._mine():
                self._add_up(held, parameters)
        return self._failure

    def _add_up(self, held: _TieHolders, parameters: Sequence[nn.Parameter]) -> None:
        like = local(parameters[0].detach())

        def send(receiver: int, data: torch.Tensor | None) -> None:
            message = self._attempt(held, lambda: _packed(like, data))
            self._talk(
                lambda: self._send(receiver, _packed(like, None) if message is None else message)
            )

        def receive(sender: int) -> torch.Tensor | None:
            return self._talk(lambda: self._receive(sender, like))

        def put() -> None:
            if total is not None:
                for parameter in parameters:
                    parameter.grad = _as_gradient(total.clone(), parameter)

        total = self._attempt(held, lambda: _sum([_gradient(p) for p in parameters]))
        if self._rank == held.owner:
            parts = [total, *(receive(other) for other in held.others)]
            total = self._attempt(held, lambda: _sum(parts))
            for other in held.others:
                send(other, total)
        else:
            send(held.owner, total)
            total = receive(held.owner)
        self._attempt(held, put)

    def _attempt(self, held: _TieHolders, compute: Callable[[], T]) -> T | None:
        """The result; None if the computation fails, or one has failed before."""
        if self._failure is not None:
            return None
        try:
            return compute()
        except Exception as raised:
            stage = held.stages_of[self._rank][0]
            action = f"gradients of the tied weight {held.tie.name_in(stage)}"
            error = stage_error(raised, self._rank_of[stage], stage, None, action)
            self._failure = Failure(error)
        return None

    def _talk(self, message: Callable[[], T]) -> T | None:
        """Send or receive, also after a failure: the other ranks still need their messages."""
        try:
            return message()
        except LostRankError as lost:
            self._failure = self._failure or Failure(lost)
        return None

    def _join(self) -> None:
        """Add the gradients of this step to the earlier ones."""
        before, self._before = self._before or {}, None
        for parameter, gradient in before.items():
            if gradient is not None:
                now, parameter.grad = parameter.grad, gradient
                if now is not None:
                    gradient.add_(now)

    def _mine(self) -> Iterator[tuple[_TieHolders, list[nn.Parameter]]]:
        """Each tied weight with the copies on this rank."""
        for held in self._holders:
            parameters = [
                named_parameters(self._stages[stage].submod)[held.tie.name_in(stage) or ""]
                for stage in held.stages_of.get(self._rank, ())
            ]
            if parameters:
                yield held, parameters

    @property
    def _rank(self) -> int:
        return self._transport.rank

    def _send(self, receiver: int, message: torch.Tensor) -> None:
        self._transport.sender(Channel(self._rank, receiver, True))(message).wait()

    def _receive(self, sender: int, like: torch.Tensor) -> torch.Tensor | None:
        message = _empty(like)
        self._transport.receiver(Channel(sender, self._rank, True))(message).wait()
        return message[_HEADER:].view(like.dtype).view(like.shape) if message[0] else None


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of a gradient, laid out as its parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if is_sharded(parameter) and is_sharded(gradient):
        return local(gradient.redistribute(placements=parameter.placements))
    return gradient.to_dense() if gradient.is_sparse else gradient


def _as_gradient(total: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not is_sharded(parameter):
        return total
    return Sharding.of(parameter).assemble(total, parameter.device_mesh)


def _sum(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return sum(there[1:], start=there[0]) if there else None


def _empty(like: torch.Tensor) -> torch.Tensor:
    """An empty message for a tensor like this one."""
    return torch.empty(_HEADER + like.nbytes, dtype=torch.uint8, device=like.device)


def _packed(like: torch.Tensor, data: torch.Tensor | None) -> torch.Tensor:
    """A message with the data, or without any."""
    message = _empty(like)
    message[:_HEADER] = data is not None
    if data is not None:
        message[_HEADER:].view(like.dtype).copy_(data.reshape(-1))
    return message
