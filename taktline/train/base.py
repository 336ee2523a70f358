"""The base of a pipeline: what was built, new connections, preemption, and the end."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch

from taktline.checkpoint.model_state import HeldModel, Processes
from taktline.checkpoint.saving import RandomNumbers
from taktline.errors import UseError
from taktline.runtime.schedule import LossFn
from taktline.train.build import Built
from taktline.train.metrics import Metrics, StragglerReport
from taktline.train.preemption import Position, Preemption
from taktline.train.ranks import Ranks
from taktline.transport.turn import Turn


class PipelineBase:
    """A pipeline that was built, until it is closed."""

    _live: Built | None

    def _begin(
        self,
        loss_fn: LossFn | None,
        on_preempt: Callable[[Any], object] | None,
        report_every: int | None,
    ) -> None:
        """Set what a pipeline has beside the objects that are built for it."""
        self._loss_fn, self._turn, self._metrics = loss_fn, Turn("this pipeline"), Metrics()
        self._report = None if report_every is None else StragglerReport(report_every)
        self._preemption = None if on_preempt is None else Preemption(on_preempt, self)
        self._data: Any = None
        """The object with the position in the data, of the latest save or load."""

    @property
    def _built(self) -> Built:
        if self._live is None:
            raise UseError("this pipeline was closed; make a new one")
        return self._live

    @property
    def _ranks(self) -> Ranks:
        return self._built.ranks

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._ranks.device

    def reconnect(self) -> None:
        """Make new connections between the same ranks; every rank calls it.

        For errors whose ``recoverable`` says "reconnect": a rank was interrupted, or hung
        for too long, and all processes are alive. Call ``zero_grad()`` before the next step.
        Raises a :class:`MismatchError` if the latest step has ended on some ranks only.
        """
        for transport in self._ranks.transports:
            transport.reconnect()
        self._built.schedule._runner.restart(self._built.schedule.steps)

    def close(self) -> None:
        """Free all but the model: connections to other ranks, and process groups made for them.

        A closed pipeline cannot be used; tensors that it has sharded cannot, either. Every rank
        closes its own, and waits for no other. ``with Pipeline(…) as pipe:`` closes it at the end
        of the block. Python closes a pipeline once nothing refers to it or its stages any more.

        >>> import torch, taktline as tl
        >>> from torch import nn
        >>> stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
        >>> with tl.Pipeline(stages, microbatches=2, ranks=2) as pipe:
        ...     output = pipe.eval(torch.ones(4, 2))
        >>> pipe
        Pipeline(closed)
        """
        with self._turn:
            if self._live is None:
                return
            alone = self._ranks.group is None
            if self._preemption is not None:
                self._preemption.close()
                self._preemption.forget()
            self._ranks.made.close()
            self._live = None
            if not alone:
                gc.collect()  # wrapped stages and their hooks hold each other, and connections

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise UseError(
            "a pipeline belongs to its process, so it cannot be copied or pickled; save "
            "pipe.state_dict(gathered=True), make another pipeline, and load it there"
        )

    def _listen(self) -> None:
        """Let every step ask whether SIGTERM has come."""
        if self._preemption is not None:
            self._built.schedule._runner.agreement.asks_to_stop = self._preemption.heard

    def _hear(self) -> None:
        """Agree whether SIGTERM has reached any rank; all ranks call this after a step or eval."""
        preemption, ranks = self._preemption, self._ranks
        if preemption is None or preemption.ending:
            return
        heard = self._built.schedule._runner.agreement.preempted
        if preemption.agreed or ranks.in_any_pipeline(heard, "whether to end"):
            preemption.agree()

    def _end_if_preempted(self) -> None:
        """End this process if SIGTERM has reached any rank, unless gradients wait anywhere."""
        preemption, ranks = self._preemption, self._ranks
        if preemption is None or preemption.ending or not preemption.agreed:
            return
        waits = self._built.schedule._runner.awaits_update()
        if not ranks.on_any_rank(waits, "whether to end"):
            preemption.end(self)

    def _position(self) -> Position:
        """Where training goes on from here."""
        state = None if self._data is None else copy.deepcopy(self._data.state_dict())
        return Position(RandomNumbers(self._held()).state_dict(), self._data, state)

    def _held(self) -> HeldModel:
        built = self._built
        return HeldModel(built.model, Processes(built.ranks.everyone), built.schedule)
