"""What a stage asks of a wrapper that averages its gradients over replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import nn
from torch.distributed import ProcessGroup

__all__ = ["GradSync"]


class GradSync(ABC):
    """Takes a wrapper's communication out of its hands, to do it where the plan says.

    ::

        begin ─▶ UNSHARD ─▶ F, B, I, W … ─▶ REDUCE_GRAD ─▶ RESHARD ─▶ end
        └ the wrapper does nothing by itself                         └ as it was

    Between ``end`` and the next ``begin`` the wrapper works as it does outside of a pipeline.
    """

    name: ClassVar[str]
    """What the wrapper is called in messages."""
    shards: ClassVar[bool] = False
    """Whether UNSHARD and RESHARD have something to do."""

    def __init__(self) -> None:
        self.accumulating = False
        """Whether a reduction is put off until somebody calls :meth:`catch_up`."""
        self._put_off = False

    @property
    @abstractmethod
    def groups(self) -> Sequence[ProcessGroup]:
        """The ranks that gradients are averaged over; several for a mesh of several dimensions."""

    @abstractmethod
    def refusal(self) -> str | None:
        """Why this wrapper cannot be part of a stage; None if it can."""

    @abstractmethod
    def begin(self) -> None:
        """Before a step: from here on nothing is gathered or reduced unasked."""

    @abstractmethod
    def end(self) -> None:
        """After a step, whatever came of it: leave the wrapper as it was."""

    @abstractmethod
    def unshard(self) -> None:
        """UNSHARD: begin to gather the parameters."""

    @abstractmethod
    def reshard(self) -> None:
        """RESHARD: release them."""

    def reduce(self) -> None:
        """REDUCE_GRAD: average the gradients, unless they are still accumulating."""
        if self.accumulating:
            self._put_off = True
        else:
            self._reduce()

    def forgo_unshard(self) -> None:
        """UNSHARD on a rank that has failed: its replicas need its part of the parameters."""
        self.unshard()

    def forgo_reshard(self) -> None:
        """RESHARD on a rank that has failed."""
        self.reshard()

    def forgo_reduce(self) -> None:
        """REDUCE_GRAD on a rank that has failed: its replicas wait for it, not for its numbers."""
        if not self.accumulating:
            self._reduce()

    def catch_up(self) -> None:
        """Do the reduction that was put off, if any was."""
        if self._put_off:
            self._put_off = False
            self.begin()
            try:
                self._reduce()
            finally:
                self.end()

    @abstractmethod
    def _reduce(self) -> None:
        """Average the gradients now."""

    def trainable(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters that the graph of a forward ends at."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    @abstractmethod
    def weights_done(self) -> None:
        """W has added gradients, of which no hook could tell the wrapper."""

    def forget(self) -> None:
        """Give up a step that failed, and gradients that are not reduced yet."""
        self._put_off = False
