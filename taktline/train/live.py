"""The base of the classes that make up a pipeline: what was built, until it is closed."""

from __future__ import annotations

import torch

from taktline.errors import UseError
from taktline.train.build import Built
from taktline.train.metrics import Metrics
from taktline.train.ranks import Ranks
from taktline.transport.turn import Turn

__all__ = ["Live"]


class Live:
    """A pipeline that was built."""

    _live: Built | None
    _turn: Turn
    _metrics: Metrics

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
