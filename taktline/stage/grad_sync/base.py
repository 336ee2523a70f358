"""The base of wrappers that average the gradients of a stage over replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import nn
from torch.distributed import ProcessGroup


class GradSync(ABC):
    """Makes a wrapper communicate only where the plan says.

    ::

        begin ─▶ UNSHARD ─▶ F, B, I, W … ─▶ REDUCE_GRAD ─▶ RESHARD ─▶ end
        └ the wrapper does nothing by itself                         └ as it was

    Between ``end`` and the next ``begin`` the wrapper works as it does outside of a pipeline.
    """

    name: ClassVar[str]
    """The wrapper's name in messages."""
    shards: ClassVar[bool] = False
    """Whether UNSHARD and RESHARD do anything."""

    def __init__(self) -> None:
        self.accumulating = False
        """Whether reductions are put off until :meth:`catch_up`."""
        self._put_off = False

    @property
    @abstractmethod
    def groups(self) -> Sequence[ProcessGroup]:
        """The groups that average gradients; several for a mesh of several dimensions."""

    @abstractmethod
    def refusal(self) -> str | None:
        """Why this wrapper cannot be part of a stage; None if it can."""

    @abstractmethod
    def begin(self) -> None:
        """Before a step: stop the wrapper from gathering and reducing by itself."""

    @abstractmethod
    def end(self) -> None:
        """After a step, also a failed one: restore the wrapper."""

    @abstractmethod
    def unshard(self) -> None:
        """UNSHARD: start to gather the parameters."""

    @abstractmethod
    def reshard(self) -> None:
        """RESHARD: release the gathered parameters."""

    def reduce(self) -> None:
        """REDUCE_GRAD: average the gradients, unless they are still accumulating."""
        self._put_off = self.accumulating
        if not self.accumulating:
            self._reduce()

    def wait(self) -> None:  # noqa: B027
        """Wait for the reductions that were started; nothing if a wrapper waits at once."""

    def forgo_unshard(self) -> None:
        """UNSHARD on a rank that has failed: its replicas need its part of the parameters."""
        self.unshard()

    def forgo_reshard(self) -> None:
        """RESHARD on a rank that has failed."""
        self.reshard()

    def forgo_reduce(self) -> None:
        """REDUCE_GRAD on a rank that has failed: its replicas wait for it."""
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
        """The trainable parameters in the graph of a forward."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    @abstractmethod
    def weights_done(self) -> None:
        """After W: handle gradients that were added without the wrapper's hooks."""

    def forget(self) -> None:
        """After a failed step: drop gradients that are not reduced yet."""
        self._put_off = False
