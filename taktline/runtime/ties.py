"""Weights that stages on several ranks share: the same values at first, gradients added up.

::

    rank 0 (embedding)   .grad ──┐            ┌──▶ .grad
                                 ├─▶ sum on ──┤
    rank 3 (head)        .grad ──┘   rank 0   └──▶ .grad
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from taktline.runtime.holders import Holders, Use, holders_of
from taktline.sharding import Sharding, is_sharded, local
from taktline.stage import PipelineStage
from taktline.stage.names import named_parameters
from taktline.transport import Channel, Transport
from taktline.transport.alone import Alone

__all__ = ["Ties"]

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
        self._met = False
        self._before: dict[nn.Parameter, torch.Tensor | None] | None = None
        self._depth = 0

    def check(self) -> None:
        """Find the weights that this rank's stages say they share; raise if one is not there."""
        if self._met:
            return
        self.uses = [
            Use.of(tie, stage)
            for stage in self._stages.values()
            for tie in stage.ties
            if stage.stage_index in tie.stages
        ]

    def meet(self, ranks: Sequence[Sequence[Use]]) -> set[Channel]:
        """Note who holds what; gives all channels for it, of all ranks."""
        self._holders = holders_of(ranks)
        pairs = {(held.owner, other) for held in self._holders for other in held.others}
        return {Channel(*ends, True) for a, b in pairs for ends in ((a, b), (b, a))}

    def begin(self, transport: Transport) -> None:
        """Give every copy of a weight the values of the first one."""
        self._transport, self._met = transport, True
        with torch.no_grad():
            for held, parameters in self._mine():
                values = like = local(parameters[0].detach())
                if transport.rank == held.owner:
                    self._send(held.others, _packed(like, values))
                else:
                    values = self._receive(held.owner, like)
                if values is not None:
                    for parameter in parameters:
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

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, nothing is added up; at its end everything is, once, unless something failed."""
        self._depth += 1
        try:
            yield
        except BaseException:
            self._depth -= 1
            self._join()
            raise
        self._depth -= 1
        self.add_up()

    def add_up(self) -> None:
        """Put the sum of all gradients of a weight into each of its copies."""
        if self._depth or self._before is None:
            return
        with torch.no_grad():
            for held, parameters in self._mine():
                self._add_up(held, parameters)
        self._join()

    def _add_up(self, held: Holders, parameters: Sequence[nn.Parameter]) -> None:
        like = local(parameters[0].detach())
        total = _sum([_gradient(parameter) for parameter in parameters])
        if self._rank == held.owner:
            total = _sum([total, *(self._receive(other, like) for other in held.others)])
            self._send(held.others, _packed(like, total))
        else:
            self._send([held.owner], _packed(like, total))
            total = self._receive(held.owner, like)
        if total is not None:
            for parameter in parameters:
                parameter.grad = _as_gradient(total.clone(), parameter)

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

    def _send(self, receivers: Sequence[int], message: torch.Tensor) -> None:
        for receiver in receivers:
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
    """A message as long as one with such a tensor."""
    return torch.empty(_HEADER + like.nbytes, dtype=torch.uint8, device=like.device)


def _packed(like: torch.Tensor, data: torch.Tensor | None) -> torch.Tensor:
    """A message: whether there is something, and what."""
    message = _empty(like)
    message[:_HEADER] = data is not None
    if data is not None:
        message[_HEADER:].view(like.dtype).copy_(data.reshape(-1))
    return message
