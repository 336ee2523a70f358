"""Weights that stages on several ranks share: the same values at first, gradients added up.

::

    rank 0 (embedding)   .grad ──┐            ┌──▶ .grad
                                 ├─▶ sum on ──┤
    rank 3 (head)        .grad ──┘   rank 0   └──▶ .grad
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from taktline.errors import LostRankError, StageError, text_of
from taktline.runtime.executor import Failure
from taktline.runtime.holders import Holders, Use, holders_of
from taktline.sharding import Sharding, is_sharded, local
from taktline.stage import PipelineStage
from taktline.stage.names import named_parameters
from taktline.transport import Channel, Transport
from taktline.transport.one_rank import Alone

__all__ = ["Ties"]

T = TypeVar("T")

_HEADER = 16
"""Bytes in front of the data that tell whether there is any; so many for alignment."""


class Ties:
    """The tied weights of this rank, and the ranks that hold them, too."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self.uses: list[Use] = []
        """What this rank tells the others."""
        self._holders: list[Holders] = []
        self._transport: Transport = Alone()
        self._rank_of: Sequence[int] = ()
        self._before: dict[nn.Parameter, torch.Tensor | None] | None = None
        self._depth = 0

    @property
    def there(self) -> bool:
        """Whether the ranks have met, and any of them holds a tied weight."""
        return bool(self._holders)

    @property
    def accumulating(self) -> bool:
        """Whether gradients are added up later, after several steps."""
        return self._depth > 0

    @property
    def apart(self) -> list[nn.Parameter]:
        """Those whose gradients of before are kept while a step is running."""
        return list(self._before or ())

    def check(self) -> None:
        """Find the weights that this rank's stages say they share; raise if one is not there."""
        self.uses = [
            Use.of(tie, stage)
            for stage in self._stages.values()
            for tie in stage.ties
            if stage.stage_index in tie.stages
        ]

    def meet(self, ranks: Sequence[Sequence[Use]]) -> set[Channel]:
        """Note who holds what; returns all channels for it, of all ranks."""
        self._holders = holders_of(ranks)
        pairs = {(held.owner, other) for held in self._holders for other in held.others}
        return {Channel(*ends, True) for a, b in pairs for ends in ((a, b), (b, a))}

    def begin(self, transport: Transport, rank_of: Sequence[int]) -> None:
        """Give every copy of a weight the values of the first one; stages lie on these ranks."""
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
                    first = transport.rank == held.owner  # which may be being saved, as it is
                    for parameter in parameters[first:]:
                        local(parameter.detach()).copy_(values)

    @contextmanager
    def step(self, *, trains: bool) -> Iterator[None]:
        """A step, with gradients of its own; they join those of before when it is over."""
        if trains and self._before is None:
            self._before = {p: p.grad for _, parameters in self._mine() for p in parameters}
            for parameter in self._before:
                parameter.grad = None
        try:
            yield
        except BaseException:
            self._join()
            raise
        if not self._depth:
            self._join()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, steps add nothing up."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def add_up(self, failure: Failure | None) -> Failure | None:
        """Put the sum of all gradients of a weight into each of its copies; returns what failed.

        After a failure, now or before, this rank has nothing to add, but takes part in every
        message, so that nobody waits for it.
        """
        if self._depth or not self._before:
            return failure
        with torch.no_grad():
            for held, parameters in self._mine():
                adding = _Adding(held, held.stages_of[self._rank][0], self._rank_of, failure)
                self._add_up(held, parameters, adding)
                failure = adding.failure
        return failure

    def _add_up(self, held: Holders, parameters: Sequence[nn.Parameter], adding: _Adding) -> None:
        like = local(parameters[0].detach())

        def send(receiver: int, data: torch.Tensor | None) -> None:
            message = adding.attempt(lambda: _packed(like, data))
            adding.talk(
                lambda: self._send(receiver, _packed(like, None) if message is None else message)
            )

        def receive(sender: int) -> torch.Tensor | None:
            return adding.talk(lambda: self._receive(sender, like))

        def put() -> None:
            if total is not None:
                for parameter in parameters:
                    parameter.grad = _as_gradient(total.clone(), parameter)

        total = adding.attempt(lambda: _sum([_gradient(parameter) for parameter in parameters]))
        if self._rank == held.owner:
            parts = [total, *(receive(other) for other in held.others)]
            total = adding.attempt(lambda: _sum(parts))
            for other in held.others:
                send(other, total)
        else:
            send(held.owner, total)
            total = receive(held.owner)
        adding.attempt(put)

    def _join(self) -> None:
        """Add the gradients of now to those of before."""
        before, self._before = self._before or {}, None
        for parameter, gradient in before.items():
            if gradient is not None:
                now, parameter.grad = parameter.grad, gradient
                if now is not None:
                    gradient.add_(now)

    def _mine(self) -> Iterator[tuple[Holders, list[nn.Parameter]]]:
        """Each weight of which this rank holds copies, and these."""
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


class _Adding:
    """One weight being added up: what is computed until something fails, and what is said."""

    def __init__(
        self, held: Holders, stage: int, rank_of: Sequence[int], failure: Failure | None
    ) -> None:
        self.failure = failure
        self._held = held
        self._stage = stage
        self._rank_of = rank_of

    def attempt(self, compute: Callable[[], T]) -> T | None:
        """What is computed; nothing if that fails, or anything has before."""
        if self.failure is not None:
            return None
        try:
            return compute()
        except Exception as raised:
            self.failure = Failure(self._told(raised))
        return None

    def talk(self, say: Callable[[], T]) -> T | None:
        """Send or receive, also after a failure: the ranks that are left still need the rest."""
        try:
            return say()
        except LostRankError as lost:
            self.failure = self.failure or Failure(lost)
        return None

    def _told(self, raised: Exception) -> StageError:
        told = StageError(
            rank=self._rank_of[self._stage],
            stage=self._stage,
            microbatch=None,
            action=f"gradients of the tied weight {self._held.tie.name_in(self._stage)}",
            reason=f"{type(raised).__name__}: {text_of(raised)}",
        )
        told.__cause__ = raised
        return told


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
    """A message as long as one with such a tensor."""
    return torch.empty(_HEADER + like.nbytes, dtype=torch.uint8, device=like.device)


def _packed(like: torch.Tensor, data: torch.Tensor | None) -> torch.Tensor:
    """A message: whether there is something, and what."""
    message = _empty(like)
    message[:_HEADER] = data is not None
    if data is not None:
        message[_HEADER:].view(like.dtype).copy_(data.reshape(-1))
    return message
