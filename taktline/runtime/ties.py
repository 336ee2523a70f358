"""Tied weights on several ranks: equal values at first, gradients added up in each step.

::

    rank 0 (embedding)   .grad ──┐            ┌──▶ .grad
                                 ├─▶ sum on ──┤
    rank 3 (head)        .grad ──┘   rank 0   └──▶ .grad
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from taktline.errors import MismatchError
from taktline.meta import Sharding, TensorMeta, is_sharded, local
from taktline.stage import PipelineStage, Tie
from taktline.stage.names import named_parameters
from taktline.transport import Channel, Transport
from taktline.transport.base import Alone
from taktline.transport.distributed import Distributed

_PROCESS = secrets.token_hex(8)
_HEADER = 16
"""Bytes in front of the data, nonzero if there is data; 16 for alignment."""


class TieUse(NamedTuple):
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
        kind = f"{TensorMeta(tuple(parameter.shape), parameter.dtype)}{shards}"
        # With the process number: a forked process has the same token and ids.
        identity = f"{_PROCESS}-{os.getpid()}-{id(parameter)}"
        return cls(tie, stage.stage_index, kind, identity)

    @property
    def plain(self) -> tuple[Any, ...]:
        """As JSON; :func:`uses_of` reads it."""
        return self.tie.uses, *self[1:]


def uses_of(plain: Iterable[Sequence[Any]]) -> list[TieUse]:
    """The uses that a rank has sent."""
    return [TieUse(Tie(dict(uses)), *others) for uses, *others in plain]


def untied(uses: Sequence[TieUse]) -> str | None:
    """Why the uses of all ranks do not fit together; None if they do."""
    found = {(use.tie, use.stage): use.kind for use in uses}
    for tie in dict.fromkeys(use.tie for use in uses):
        kinds = {stage: found.get((tie, stage)) for stage in tie.stages}
        for stage, kind in kinds.items():
            if kind is None:
                return (
                    f"{tie}: these are tied, but not in the ties= of stage {stage}; pass the same "
                    "ties= to each of the stages"
                )
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{kind} in stage {stage}" for stage, kind in kinds.items())
            return f"{tie}: these are tied, but differ: {listed}; tie equal weights"
    return None


class Ties:
    """The tied weights of this rank, and the other ranks that hold them."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self.uses: list[TieUse] = []
        """The tied weights in this rank's stages."""
        self._holders: dict[Tie, dict[int, list[int]]] = {}
        """Of each weight with several copies, by rank: a stage for each copy. A parameter that
        several stages share is one copy. The first rank adds up the gradients."""
        self._transport: Transport = Alone()
        self._before: dict[nn.Parameter, torch.Tensor | None] | None = None
        self.there = False
        """Whether any rank is known to hold a tied weight."""
        self.accumulating = False
        """Whether gradients of several steps are added up later."""

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
        found: dict[Tie, dict[int, list[int]]] = {}
        seen: set[tuple[Tie, str]] = set()
        uses = [(use, rank) for rank, uses in enumerate(ranks) for use in uses]
        for use, rank in sorted(uses, key=lambda each: each[0].stage):
            if (use.tie, use.identity) not in seen:
                seen.add((use.tie, use.identity))
                found.setdefault(use.tie, {}).setdefault(rank, []).append(use.stage)
        self._holders = {t: held for t, held in found.items() if sum(map(len, held.values())) > 1}
        self.there = bool(self._holders)
        channels: set[Channel] = set()
        for owner, *others in self._holders.values():
            for other in others:
                channels |= {Channel(owner, other, True), Channel(other, owner, True)}
        return channels

    def begin(self, transport: Transport) -> None:
        """Give every copy of a weight the values of the first one."""
        self._transport = transport
        with torch.no_grad():
            for tie, parameters in self._mine():
                values = like = local(parameters[0].detach())
                owner, *others = self._holders[tie]
                if transport.rank == owner:
                    for other in others:
                        self._send(other, like, values)
                    parameters = parameters[1:]  # the first is not written: a save may read it
                else:
                    values = self._receive(owner, like)
                if values is not None:
                    for parameter in parameters:
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

    def _join(self) -> None:
        """Add the gradients of this step to the earlier ones."""
        before, self._before = self._before or {}, None
        for parameter, gradient in before.items():
            if gradient is not None:
                now, parameter.grad = parameter.grad, gradient
                if now is not None:
                    gradient.add_(now)

    def add_up(self) -> None:
        """Put the sum of all gradients of a weight into each of its copies.

        Also after a failure this rank takes part in every message, so that no rank waits for it.
        """
        if self.accumulating or not self._before:
            return
        try:
            with torch.no_grad():
                for tie, parameters in self._mine():
                    self._add_up(tie, parameters)
        except Exception as error:
            if isinstance(self._transport, Distributed):
                self._transport.raised(error)  # the other ranks wait for a message
            raise

    def _add_up(self, tie: Tie, parameters: Sequence[nn.Parameter]) -> None:
        like, (owner, *others) = local(parameters[0].detach()), self._holders[tie]
        total = _sum(map(_gradient, parameters))
        if self._transport.rank == owner:
            total = _sum([total, *(self._receive(other, like) for other in others)])
            for other in others:
                self._send(other, like, total)
        else:
            self._send(owner, like, total)
            total = self._receive(owner, like)
        if total is None:
            return
        for parameter in parameters:
            gradient = total.clone()
            if is_sharded(parameter):
                gradient = Sharding.of(parameter).assemble(gradient, parameter.device_mesh)
            parameter.grad = gradient

    def _mine(self) -> Iterator[tuple[Tie, list[nn.Parameter]]]:
        """Each tied weight with the copies on this rank."""
        for tie, stages_of in self._holders.items():
            parameters = [
                named_parameters(self._stages[stage].submod)[tie.name_in(stage) or ""]
                for stage in stages_of.get(self._transport.rank, ())
            ]
            if parameters:
                yield tie, parameters

    def _send(self, receiver: int, like: torch.Tensor, data: torch.Tensor | None) -> None:
        """Send data, or that there is none."""
        message = _empty(like)
        message[:_HEADER] = data is not None
        if data is not None:
            message[_HEADER:].view(like.dtype).copy_(data.reshape(-1))
        self._transport.sender(Channel(self._transport.rank, receiver, True))(message).wait()

    def _receive(self, sender: int, like: torch.Tensor) -> torch.Tensor | None:
        message = _empty(like)
        self._transport.receiver(Channel(sender, self._transport.rank, True))(message).wait()
        return message[_HEADER:].view(like.dtype).view(like.shape) if message[0] else None


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of a gradient, laid out as its parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if is_sharded(parameter) and is_sharded(gradient):
        return local(gradient.redistribute(placements=parameter.placements))
    return gradient.to_dense() if gradient.is_sparse else gradient


def _sum(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return sum(there[1:], start=there[0]) if there else None


def _empty(like: torch.Tensor) -> torch.Tensor:
    """An empty message for a tensor like this one."""
    return torch.empty(_HEADER + like.nbytes, dtype=torch.uint8, device=like.device)
