"""Hands losses on from rank to rank as tensors: no host waits for the GPU that computes them.

They take the way of the gradients, from the last stage to the first, and reach each rank where its
first gradient does::

    stage        0         1         2         3
    rank         0         1         2         0
    losses                 1 ◀────── 2 ◀────── 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from taktline.transport import Channel, Handle, Transport

__all__ = ["Relay"]


class Relay:
    """The way of the losses on one rank; stages lie on ``rank_of``."""

    def __init__(self, transport: Transport, rank_of: Sequence[int], device: torch.device) -> None:
        self._transport = transport
        self._device = device
        # By rank its last stage, where the losses reach it: from the stage after that.
        reached = {rank: stage for stage, rank in enumerate(rank_of)}
        del reached[rank_of[-1]]
        sources = {rank: rank_of[stage + 1] for rank, stage in reached.items()}
        self._source = sources.get(transport.rank)
        self._targets = [rank for rank, source in sources.items() if source == transport.rank]
        self._sent: list[Handle] = []

    def share(self, losses: Mapping[int, torch.Tensor], count: int) -> torch.Tensor:
        """The losses of so many micro-batches, the same on every rank; all of them take part.

        What a rank without losses has to say is zeros.
        """
        here = self._transport.rank
        if self._source is not None:
            values = torch.empty(count, dtype=torch.float64, device=self._device)
            arrives = Channel(self._source, here, True)
            self._transport.receiver(arrives)(values.view(torch.uint8)).wait()
        elif losses:
            zero = torch.zeros((), dtype=torch.float64, device=self._device)
            found = [losses[m].to(zero) if m in losses else zero for m in range(count)]
            values = torch.stack(found)
        else:
            values = torch.zeros(count, dtype=torch.float64, device=self._device)
        data = values.view(torch.uint8)
        self._sent = [
            self._transport.sender(Channel(here, target, True))(data) for target in self._targets
        ]
        return values

    def settle(self) -> None:
        """Let go of what was sent, once all ranks have posted their receives."""
        for handle in self._sent:
            handle.wait()
        self._sent = []
